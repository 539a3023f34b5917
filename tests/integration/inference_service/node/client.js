// A client in another language: it knows the protos and gRPC, and nothing of ours.
//
//   node client.js ADDRESS MODEL SHAPE PIXELS      (SHAPE: rows,height,width; PIXELS: a file of bytes)
//
// Asks for all rows at once, raw and typed, and for each by itself over one stream, with a bad request among them.
// PROTO_PATH lists the folders of the protos. It prints one line of JSON on what it read.
'use strict';

const fs = require('node:fs');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const [ADDRESS, MODEL, SHAPE, PIXELS] = process.argv.slice(2);

const { inference } = grpc.loadPackageDefinition(
  protoLoader.loadSync('inference/grpc_service.proto', {
    includeDirs: process.env.PROTO_PATH.split(':'),
    keepCase: true,
    longs: Number,
    enums: String,
  }),
);
const service = new inference.GRPCInferenceService(ADDRESS, grpc.credentials.createInsecure());

main().then(
  (found) => console.log(JSON.stringify(found)),
  (error) => {
    console.error(error);
    process.exitCode = 1;
  },
);

async function main() {
  const shape = SHAPE.split(',').map(Number);
  const pixels = fs.readFileSync(PIXELS);
  const whole = await call('ModelInfer', raw('whole', shape, pixels));
  const typed = await call('ModelInfer', {
    model_name: MODEL,
    inputs: [{ name: 'image', datatype: 'UINT8', shape, contents: { uint_contents: Array.from(pixels) } }],
    outputs: [{ name: 'label' }],
  });
  const { model_stats } = await call('ModelStatistics', { name: MODEL });
  return {
    id: whole.id,
    version: whole.model_version,
    raw: labels(whole),
    typed: typed.outputs[0].contents.int64_contents,
    streamed: await streamed(shape, pixels),
    answered: model_stats[0].inference_stats.success.count,
    refused: await call('ModelInfer', raw('bad', [...shape, 1], pixels)).catch(({ code, details }) => ({ code, details })),
  };
}

function raw(id, shape, pixels, model_name = MODEL) {
  return { id, model_name, inputs: [{ name: 'image', datatype: 'UINT8', shape }], raw_input_contents: [pixels] };
}

function labels(answer) {
  const bytes = answer.raw_output_contents[answer.outputs.findIndex(({ name }) => name === 'label')];
  return Array.from({ length: bytes.length / 8 }, (_, index) => Number(bytes.readBigInt64LE(8 * index)));
}

function streamed([rows, ...rest], pixels) {
  return new Promise((resolve, reject) => {
    const answers = [];
    const stream = service.ModelStreamInfer({ deadline: Date.now() + 60_000 });
    stream.on('data', ({ error_message, infer_response }) =>
      answers.push(error_message || [infer_response.id, ...labels(infer_response)]),
    );
    stream.on('error', reject);
    stream.on('end', () => resolve(answers));
    const size = pixels.length / rows;
    for (let row = 0; row < rows; row++) {
      stream.write(raw(`r${row}`, [1, ...rest], pixels.subarray(row * size, (row + 1) * size)));
    }
    stream.write(raw('unknown', [rows, ...rest], pixels, 'nobody'));
    stream.end();
  });
}

function call(method, request, timeout_s = 20) {
  return new Promise((resolve, reject) => {
    service[method](request, { deadline: Date.now() + timeout_s * 1000 }, (error, answer) =>
      error ? reject(error) : resolve(answer),
    );
  });
}
