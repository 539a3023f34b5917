// A client in another language: it knows the protos, gRPC and Arrow, and nothing of ours.
//
//   node client.js ADDRESS SOURCE FORMAT      (FORMAT: csv or arrow)
//
// Makes a dataset, uploads the file SOURCE in chunks, imports it, and reads it back. PROTO_PATH lists the folders of the
// protos. It prints one line of JSON on what it read.
'use strict';

const assert = require('node:assert/strict');
const crypto = require('node:crypto');
const fs = require('node:fs');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');
const arrow = require('apache-arrow');

const CHUNK_BYTES = 64 * 1024;
const RESUME_AFTER_CHUNKS = 3;
const [ADDRESS, SOURCE, FORMAT] = process.argv.slice(2);

const protos = grpc.loadPackageDefinition(
  protoLoader.loadSync(['millrace/data/v1/data_service.proto', 'google/longrunning/operations.proto'], {
    includeDirs: process.env.PROTO_PATH.split(':'),
    keepCase: true,
    longs: Number,
    enums: String,
  }),
);
const data = new protos.millrace.data.v1.DataService(ADDRESS, grpc.credentials.createInsecure());
const operations = new protos.google.longrunning.Operations(ADDRESS, grpc.credentials.createInsecure());

main().then(
  (found) => console.log(JSON.stringify(found)),
  (error) => {
    console.error(error);
    process.exitCode = 1;
  },
);

async function main() {
  const bytes = fs.readFileSync(SOURCE);
  const request_id = crypto.randomUUID();
  const dataset = await call(data, 'CreateDataset', { dataset_id: `node-${FORMAT}`, request_id });
  const again = await call(data, 'CreateDataset', { dataset_id: `node-${FORMAT}`, request_id });
  assert.equal(again.uid, dataset.uid);

  const upload = await uploaded(dataset.name, bytes);
  const version = await imported(dataset.name, upload.name);
  assert.equal(version.state, 'STATE_ACTIVE');

  const table = await read(version.name);
  const columns = Object.fromEntries(table.schema.fields.map((field) => [field.name, String(field.type)]));
  const values = Object.fromEntries(table.schema.fields.map((field) => [field.name, plain(table.getChild(field.name))]));
  return { dataset: dataset.name, version: version.name, rows: table.numRows, columns, values };
}

// In two calls, as after a broken connection: the second goes on from the last acknowledged byte.
async function uploaded(parent, bytes) {
  const upload = await call(data, 'StartUpload', { parent, request_id: crypto.randomUUID() });
  assert.equal(await send(upload.name, bytes, 0, RESUME_AFTER_CHUNKS * CHUNK_BYTES), RESUME_AFTER_CHUNKS * CHUNK_BYTES);
  const { acknowledged_size } = await call(data, 'GetUpload', { name: upload.name });
  assert.equal(acknowledged_size, RESUME_AFTER_CHUNKS * CHUNK_BYTES);
  assert.equal(await send(upload.name, bytes, acknowledged_size, bytes.length), bytes.length);
  const sha256 = crypto.createHash('sha256').update(bytes).digest('hex');
  const committed = await call(data, 'CommitUpload', { name: upload.name, size_bytes: bytes.length, sha256 });
  assert.equal(committed.state, 'STATE_COMMITTED');
  return committed;
}

// Returns the last acknowledged size.
function send(name, bytes, begin, end) {
  return new Promise((resolve, reject) => {
    let acknowledged = begin;
    const stream = data.UploadChunks({ deadline: Date.now() + 60_000 });
    stream.on('data', (answer) => {
      assert.ok(answer.acknowledged_size >= acknowledged, 'acknowledged sizes never fall');
      acknowledged = answer.acknowledged_size;
    });
    stream.on('error', reject);
    stream.on('end', () => resolve(acknowledged));
    for (let offset = begin; offset < end; offset += CHUNK_BYTES) {
      const chunk = bytes.subarray(offset, Math.min(offset + CHUNK_BYTES, end));
      stream.write({ ...(offset === begin && { name }), offset, data: chunk, crc32c: crc32c(chunk) });
    }
    stream.end();
  });
}

async function imported(parent, upload) {
  const source = { split: 'train', [FORMAT]: { uri: upload } };
  let operation = await call(data, 'ImportVersion', { parent, sources: [source], request_id: crypto.randomUUID() });
  while (!operation.done) {
    operation = await call(operations, 'WaitOperation', { name: operation.name, timeout: { seconds: 30 } }, 120);
  }
  assert.ok(operation.response, JSON.stringify(operation.error));
  const { rows_read } = unpacked('ImportVersionMetadata', operation.metadata);
  const version = unpacked('DatasetVersion', operation.response);
  assert.equal(version.row_count, rows_read);
  return call(data, 'GetVersion', { name: version.name });
}

async function read(name) {
  const pieces = [];
  for await (const message of data.ReadVersion({ name }, { deadline: Date.now() + 60_000 })) {
    pieces.push(message.arrow_ipc);
  }
  return arrow.tableFromIPC(Buffer.concat(pieces));
}

function unpacked(type, any) {
  assert.equal(any.type_url, `type.googleapis.com/millrace.data.v1.${type}`);
  return protos.millrace.data.v1[type].deserialize(any.value);
}

function plain(column) {
  return Array.from(column, (value) => (typeof value === 'bigint' ? Number(value) : value));
}

function call(client, method, request, timeout_s = 10) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + timeout_s * 1000 }, (error, answer) =>
      error ? reject(error) : resolve(answer),
    );
  });
}

// CRC-32C (Castagnoli), reflected, of RFC 3720.
const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, index) => {
  let crc = index;
  for (let bit = 0; bit < 8; bit++) crc = crc & 1 ? (crc >>> 1) ^ 0x82f63b78 : crc >>> 1;
  return crc;
});

function crc32c(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = CRC_TABLE[(crc ^ byte) & 0xff] ^ (crc >>> 8);
  return (crc ^ 0xffffffff) >>> 0;
}
