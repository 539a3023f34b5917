"""The renames of a tree by a map, and what they leave alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.rename import apply_plan, main, make_plan
from tools.rename_map import RenameError, Renames

MAP = """
keep_files = ["kept/"]

[[words]]
old = "door"
new = "load_shedder"
keep = ["front_door"]

[[words]]
old = "roll_out"
new = "rollout"

[[words]]
old = "room"
new = "capacity"
tests = false

[names]
Told = "PeerState"

[[scoped]]
in = ["app/plans"]
names = { Part = "StepPart", _part = "_cut" }

[[strings]]
in = ["app/"]
names = { roll_out = "rollout" }

[reasons]
NO_ROOM = "INSUFFICIENT_RESOURCES"

[environment]
APP_DOORS = "APP_LOAD_SHEDDERS"

[files]
"app/walk.py" = "app/context.py"
"""


class Tree:
    """A git repository with a map."""

    def __init__(self, root: Path) -> None:
        self.root = root
        subprocess.run(["git", "init", "-q", str(root)], check=True)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        subprocess.run(["git", "add", path], cwd=self.root, check=True)

    def read(self, path: str) -> str:
        return (self.root / path).read_text()

    def rename(self, table: str = MAP) -> int:
        """Apply the map, and return how many names that changed."""
        plan = make_plan(self.root, self._load(table))
        assert not plan.clashes
        apply_plan(self.root, plan)
        return len(plan.changes)

    def clashes(self, table: str = MAP) -> tuple[str, ...]:
        return make_plan(self.root, self._load(table)).clashes

    def renamed(self, text: str, path: str = "app/one.py") -> str:
        """What becomes of a file with this text."""
        self.write(path, text)
        self.rename()
        return self.read(path)

    def _load(self, table: str) -> Renames:
        file = self.root.with_name("map.toml")
        file.write_text(table)
        return Renames.load(file)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("door", "load_shedder"),
        ("_door", "_load_shedder"),
        ("Door", "LoadShedder"),
        ("MAX_DOOR_S", "MAX_LOAD_SHEDDER_S"),
        ("DoorLimits", "LoadShedderLimits"),
        ("roll_out_limits", "rollout_limits"),
        ("RollOutLimits", "RolloutLimits"),
        ("ROLL_OUT_PREFIX", "ROLLOUT_PREFIX"),
        ("roll_out_pb2", "rollout_pb2"),
        ("Told", "PeerState"),
        ("_Told", "_PeerState"),
        ("front_door", "front_door"),
        ("doorway", "doorway"),
        ("roll", "roll"),
        ("rollOut", "rollout"),
        ("test_a_door_has_room", "test_a_load_shedder_has_room"),
        ("has_room", "has_capacity"),
    ],
)
def test_one_entry_gives_every_form_of_a_name(tree: Tree, old: str, new: str) -> None:
    assert tree.renamed(f"{old} = 1\n") == f"{new} = 1\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('text = f"{door.wait_s:.1f} s before the door"', 'text = f"{load_shedder.wait_s:.1f} s before the door"'),
        ('text = f"{{door}} {limits[door]!r:>{room}}"', 'text = f"{{door}} {limits[load_shedder]!r:>{capacity}}"'),
        ('getattr(server, "door")', 'getattr(server, "load_shedder")'),
        ('monkeypatch.setattr(server, "ROOM_S", 0)', 'monkeypatch.setattr(server, "CAPACITY_S", 0)'),
        ('mark.parametrize(("door", "x"), [])', 'mark.parametrize(("load_shedder", "x"), [])'),
        ('mark.parametrize("door, x", [("door", 1)])', 'mark.parametrize("load_shedder, x", [("door", 1)])'),
        ('__all__ = ["Door"]', '__all__ = ["LoadShedder"]'),
        ('field("spec.door.limits")', 'field("spec.load_shedder.limits")'),
        ('reason = "NO_ROOM"', 'reason = "INSUFFICIENT_RESOURCES"'),
        ('environ["APP_DOORS"]', 'environ["APP_LOAD_SHEDDERS"]'),
        ('key = "roll_out"', 'key = "rollout"'),
        ("door.py  # of `door`, not the door", "load_shedder.py  # of `load_shedder`, not the door"),
        ('"""No RollOut without room for `room`."""', '"""No Rollout without room for `capacity`."""'),
    ],
)
def test_names_change_in_code_and_where_text_quotes_them(tree: Tree, old: str, new: str) -> None:
    assert tree.renamed(f"{old}\n") == f"{new}\n"


@pytest.mark.parametrize(
    "text",
    [
        'record["door"]  # a key of a stored record',
        'error = "the door is closed: there is no room"',
        '"""Shuts the door where there is no room."""',
        'path = "a/room/b"',
    ],
)
def test_prose_and_strings_that_may_be_stored_stay(tree: Tree, text: str) -> None:
    assert tree.renamed(f"{text}\n") == f"{text}\n"


def test_a_string_of_one_word_changes_only_where_the_map_has_it(tree: Tree) -> None:
    assert tree.renamed('key = "roll_out"\n', "other/one.py") == 'key = "roll_out"\n'


def test_an_imported_name_is_renamed_as_where_it_is_defined(tree: Tree) -> None:
    tree.write("app/__init__.py", "")
    tree.write("app/plans.py", "class Part:\n    def _part(self, part: int) -> int:\n        return part\n")
    tree.write("app/others.py", "class Part: ...\n")
    tree.write("use/one.py", "from app.plans import Part\n\nparts: list[Part] = [Part()]\n")
    tree.write("use/two.py", "from app.others import Part\n\nparts: list[Part] = [Part()]\n")
    tree.rename()
    assert tree.read("app/plans.py") == "class StepPart:\n    def _cut(self, part: int) -> int:\n        return part\n"
    assert tree.read("use/one.py") == "from app.plans import StepPart\n\nparts: list[StepPart] = [StepPart()]\n"
    assert tree.read("use/two.py") == "from app.others import Part\n\nparts: list[Part] = [Part()]\n"


def test_files_move_and_whatever_names_them_follows(tree: Tree) -> None:
    tree.write("app/__init__.py", "")
    tree.write("app/door.py", "WAIT_S = 1\n")
    tree.write("app/walk.py", "class Walk: ...\n")
    tree.write("kept/__init__.py", "")
    tree.write("kept/door.py", "WAIT_S = 2\n")
    tree.write(
        "tests/test_door.py",
        "import app.walk\nfrom app import door\nfrom app.walk import Walk\nfrom kept import door as other\n\n"
        'patch("app.door.WAIT_S", 0)\npatch("kept.door.WAIT_S", 0)\n'
        "assert door.WAIT_S < other.WAIT_S and app.walk.Walk is Walk\n",
    )
    tree.write("README.md", "See app/door.py, `walk.py` and `app.door`; `MAX_DOOR` is of `kept/door.py`.\n")
    tree.rename()
    assert sorted(path.name for path in (tree.root / "app").iterdir()) == [
        "__init__.py",
        "context.py",
        "load_shedder.py",
    ]
    assert tree.read("kept/door.py") == "WAIT_S = 2\n"
    assert tree.read("tests/test_load_shedder.py") == (
        "import app.context\nfrom app import load_shedder\nfrom app.context import Walk\n"
        "from kept import door as other\n\n"
        'patch("app.load_shedder.WAIT_S", 0)\npatch("kept.door.WAIT_S", 0)\n'
        "assert load_shedder.WAIT_S < other.WAIT_S and app.context.Walk is Walk\n"
    )
    assert tree.read("README.md") == (
        "See app/load_shedder.py, `context.py` and `app.load_shedder`; `MAX_LOAD_SHEDDER` is of `kept/door.py`.\n"
    )


def test_protos_and_other_files_change_by_identifiers(tree: Tree) -> None:
    tree.write("protos/x/roll_out.proto", "message RollOut {} // NO_ROOM: no room.\n")
    tree.write("protos/x/service.proto", 'import "x/roll_out.proto";\nmessage S { RollOut roll_out = 1; }\n')
    tree.write("compose.yml", "environment:\n  APP_DOORS: 2 # how many doors\n")
    tree.rename()
    assert tree.read("protos/x/rollout.proto") == "message Rollout {} // INSUFFICIENT_RESOURCES: no room.\n"
    assert tree.read("protos/x/service.proto") == ('import "x/rollout.proto";\nmessage S { Rollout rollout = 1; }\n')
    assert tree.read("compose.yml") == "environment:\n  APP_LOAD_SHEDDERS: 2 # how many doors\n"


def test_a_comment_that_grows_too_long_goes_on_in_the_next_line(tree: Tree) -> None:
    long = "# " + "word " * 20 + "MAX_DOOR_S is here"
    assert tree.renamed(f"{long}\n# and on.\nx = 1\n") == (
        "# " + "word " * 20 + "MAX_LOAD_SHEDDER_S\n# is here and on.\nx = 1\n"
    )


def test_a_second_run_changes_nothing(tree: Tree) -> None:
    tree.write("app/__init__.py", "")
    tree.write("app/door.py", 'class Door:\n    """Of a `door`."""\n\n    room = f"{Told}"\n')
    assert tree.rename() > 0
    assert tree.rename() == 0


def test_two_names_of_one_scope_that_would_be_the_same_are_refused(tree: Tree) -> None:
    tree.write("app/one.py", "def f(door: int) -> int:\n    load_shedder = door\n    return load_shedder\n")
    assert tree.clashes() == ("app/one.py:2: door and load_shedder would both be load_shedder",)


def test_nothing_is_written_where_names_clash(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    tree.write("app/one.py", "door, load_shedder = 1, 2\n")
    map_file = tree.root.with_name("map.toml")
    map_file.write_text(MAP)
    assert main(["--root", str(tree.root), "--map", str(map_file)]) == 1
    assert "app/one.py:1: door and load_shedder would both be load_shedder" in capsys.readouterr().err
    assert tree.read("app/one.py") == "door, load_shedder = 1, 2\n"


def test_a_map_that_would_rename_its_own_new_names_is_refused(tree: Tree) -> None:
    table = '[[words]]\nold = "door"\nnew = "room_door"\n'
    with pytest.raises(RenameError, match="door becomes room_door, which becomes room_room_door"):
        tree.clashes(table)
