from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from lazyio.bench.abba.definition import plan_of
from lazyio.bench.abba.plan import OUT_FILE, ColdTable, Plan, differences
from lazyio.errors import SettingError

MakePlan = Callable[..., Plan]

WHOLE = """
command = "bench {model} --prompts {tokens} --modes {mode} --json {out}"
before_each = ["prepare", "{mode}"]
reference = "on"
rounds = 8
timeout_s = 480
equal = ["prompts.0.digest"]
env = { OMP_NUM_THREADS = 1, KIND = "all" }

[cold]
model = "{model}"

[arms.uring]
set = { mode = "uring" }
env = { KIND = "ring {mode}" }

[arms.on]
set = { mode = "on" }

[cells.2k]
set = { tokens = 2048, model = "a b.gguf" }
[cells.8k]
set = { tokens = 8192, model = "c.gguf" }

[metrics.prompt_s]
path = "prompts.0.rounds.*.0.run.wall_s"
better = "lower"
[metrics.reads]
"""


def test_a_whole_definition() -> None:
    plan = plan_of(tomllib.loads(WHOLE))
    assert (plan.cells, plan.arms, plan.reference, plan.rounds) == (["2k", "8k"], ["uring", "on"], "on", 8)
    assert plan.timeout_s == 480
    job = plan.jobs["2k"]["uring"]
    assert job.command == ("bench", "a b.gguf", "--prompts", "2048", "--modes", "uring", "--json", OUT_FILE)
    assert job.env == {"OMP_NUM_THREADS": "1", "KIND": "ring uring"}
    assert job.before_each == ("prepare", "uring")
    assert job.cold == ColdTable("a b.gguf", None)
    assert plan.jobs["8k"]["on"].env["KIND"] == "all"
    assert [(metric.name, str(metric.place), metric.better) for metric in plan.metrics] == [
        ("prompt_s", "prompts.0.rounds.*.0.run.wall_s", "lower"),
        ("reads", "metrics.reads", None),
    ]
    assert [str(place) for place in plan.equal] == ["prompts.0.digest"]
    assert plan.as_json()["cells"]["2k"]["on"]["command"][-1] == "{out}"


def test_what_is_not_given() -> None:
    plan = plan_of({"arms": {"a": {"command": "x"}, "b": {"command": ["y", "{{z}} {1}", "{'k': 1}"], "set": {"1": 2}}}})
    assert (plan.cells, plan.reference, plan.rounds, plan.timeout_s) == (["all"], "a", 6, None)
    assert [str(place) for place in plan.equal] == ["tokens", "logits"]
    assert [(str(metric.place), metric.better) for metric in plan.metrics] == [("process.wall_s", "lower")]
    assert plan.jobs["all"]["b"].command == ("y", "{z} 2", "{'k': 1}")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"round": 4}, "the definition has 'round', which it can't have; did you mean rounds"),
        ({"arms": {"a": {"comand": "x"}, "b": {}}}, "arms.a has 'comand'.*did you mean command"),
        ({"arms": {"a": {}}}, "there are 1 arms and 1 cells"),
        ({"cells": {}}, "there are 2 arms and 0 cells"),
        ({"cells": []}, "cells is .*it should be a table of tables"),
        ({"cells": {"x": 2048}}, "cells.x is 2048; it should be a table"),
        ({"cells": {"x y": {}}}, "cells has 'x y'; a name is"),
        ({"reference": "c"}, "reference is 'c', which is none of the arms: a, b"),
        ({"command": "run"}, r"arms.a.set has n, and no command has the word \{n\}"),
        ({"cells": {"x": {"set": {"m": 1}}}}, "cells.x.set has m"),
        ({"command": "run {n} {tokens}"}, "arm a in cell all: there is no setting tokens.*there is n, out"),
        ({"before_each": "run {out}"}, r"there is no setting out for \{out\}.*written \{\{out\}\}"),
        ({"command": "run '{n}"}, "No closing quotation"),
        ({"command": ""}, "command is empty"),
        ({"command": ["run", 3]}, "an entry of command is 3; it should be text"),
        ({"command": 3}, "command is 3; it should be a list"),
        ({"command": "run {n} \0"}, "has a NUL"),
        ({"env": {"A=B": 1}}, "env has 'A=B', which can't be the name of a variable"),
        ({"env": {"A": True}}, "env.A is True; it can be text or a number"),
        ({"cells": {"x": {"set": {"n": 3}}}}, "n is set by both the cell and the arm"),
        ({"cells": {"x": {"command": "y {n}"}}, "arms": {"a": {"command": "z"}, "b": {}}}, "both have a command"),
        ({"arms": {"a": {"set": {"out": 1}}, "b": {}}}, "can't be called 'out'"),
        ({"arms": {"a": {"set": {"n": 1}}, "b": {"set": {"n": 1}}}}, "arms a and b are the same in every cell"),
        ({"rounds": 3}, "rounds is 3; it can be 2, 4, 6"),
        ({"rounds": 0}, "rounds is 0"),
        ({"rounds": True}, "rounds is True"),
        ({"timeout_s": 0}, "timeout_s is 0; it can be a number of seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"metrics": {}}, "no metric is judged"),
        ({"metrics": {"x": {}}}, "no metric is judged"),
        ({"metrics": {"x": {"better": "less"}}}, "metrics.x.better is 'less'; it can be 'lower' or 'higher'"),
        ({"metrics": {"x": {"better": "lower", "path": "a..b"}}}, "'a..b' is no path"),
        ({"equal": "tokens"}, "equal is 'tokens'; it should be a list of texts"),
        ({"cold": {"tensor": "t"}}, "cold has no model"),
        ({"cold": "m"}, "cold is 'm'; it should be a table"),
        ({"cold": {"model": "{m}"}}, "there is no setting m"),
    ],
)
def test_what_is_refused(make_plan: MakePlan, given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        make_plan(**given)


def test_an_arm_without_a_command() -> None:
    with pytest.raises(SettingError, match="arm b in cell all has no command"):
        plan_of({"arms": {"a": {"command": "x"}, "b": {}}})


def test_differences_name_their_place(make_plan: MakePlan) -> None:
    plan = make_plan().as_json()
    assert differences(plan, make_plan().as_json()) == []
    assert differences(plan, make_plan(rounds=4).as_json()) == ["rounds was 2 and is 4"]
    changed = differences(plan, make_plan(cold={"model": "m"}, command="run {n} -v").as_json())
    assert "cells.all.a.command was ['run', '1'] and is ['run', '1', '-v']" in changed
    assert "cells.all.b.cold.model was not there and is 'm'" in changed
    two = {"x": {"better": "lower"}, "y": {"better": "lower"}}
    one, other = (make_plan(metrics=dict(pairs)).as_json() for pairs in (two.items(), reversed(two.items())))
    assert differences(one, other) == ["the order of its parts changed"]
