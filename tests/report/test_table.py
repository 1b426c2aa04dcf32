"""The table as a log file shows it."""

import io
from pathlib import Path
from typing import Any

from llamafactory_ascend.report.table import draw

MIB = 1 << 20


def rank(number: int, peak: float = 10.0, **sections: Any) -> dict[str, Any]:
    memory = {
        "allocated": 0,
        "reserved": 0,
        "peak_allocated": int(peak * MIB),
        "peak_reserved": 2 * int(peak * MIB),
    }
    layers = {"vision": 27, "text": 64}
    checkpointing = {"layers": layers, "expected": layers, "checkpointed": layers, "problems": []}
    return {
        "rank": number,
        "hostname": "n",
        "pid": 1,
        "memory": memory,
        "checkpointing": checkpointing,
        **sections,
    }


def patch(name: str, state: str = "hit", reason: str = "", source: str = "still needed") -> dict[str, str]:
    return {"id": name, "state": state, "reason": reason, "source": source}


def report(**changes: Any) -> dict[str, Any]:
    return {
        "state": "completed",
        "explanation": "",
        "last_step": 4,
        "max_steps": 4,
        "world_size": 8,
        "device": {"name": "Ascend910B3", "simulated": False},
        "failures": [],
        "decisions": {"checkpointing": {"choice": "every layer", "reason": "`ascend.checkpointing: full`"}},
        "ranks": [rank(number) for number in range(8)],
        "patches": [patch("a"), patch("b", "verified")],
        "patch_differences": [],
        "findings": [],
        **changes,
    }


def lines(found: dict[str, Any], path: str = "out/ascend_report.json") -> list[str]:
    return [
        " ".join(line.split()) for line in draw(found, Path(path), io.StringIO()).splitlines() if line.strip()
    ]


def test_eight_ranks_that_agree_are_one_line_each() -> None:
    assert lines(report()) == [
        "llamafactory-ascend: completed",
        "steps 4 of 4",
        "device 8 ranks, Ascend910B3",
        "checkpointing every layer (`ascend.checkpointing: full`)",
        "memory peak allocated 10.0 MiB, peak reserved 20.0 MiB; rank 0 of 8, the least 10.0 MiB",
        "checkpointed layers vision 27 of 27 expected (27 layers), text 64 of 64 expected (64 layers)",
        "patches 2 of 2 in place on every rank",
        "report: out/ascend_report.json",
    ]


def test_ranks_that_differ_are_told_apart() -> None:
    ranks = [rank(number, peak=10 + number) for number in range(8)]
    for number in (3, 4):
        ranks[number]["checkpointing"] = {
            "layers": {"text": 64},
            "expected": {"text": 64},
            "checkpointed": {"text": 60},
            "problems": ["4 layers never ran"],
        }
    found = " ".join(lines(report(ranks=ranks)))
    assert "peak allocated 17.0 MiB, peak reserved 34.0 MiB; rank 7 of 8, the least 10.0 MiB" in found
    assert "checkpointed layers (rank 0-2,5-7) vision 27 of 27 expected (27 layers), text 64" in found
    assert "checkpointed layers (rank 3-4) text 60 of 64 expected (64 layers)" in found
    assert "4 layers never ran" in found


def test_sections_of_other_plugins() -> None:
    sections = {
        "adapter": {
            "ok": False,
            "tensors": 128,
            "path": "out/adapter_model.safetensors",
            "problems": ["3 tensors are zero"],
        },
        "sharding": {"version": 2, "modules": 92, "by_class": {"Qwen3_5DecoderLayer": 64}, "even": True},
        "steps": {"pairs": [{"name": "a"}, {"name": "b"}], "norm": 0.28612345},
        "empty": None,
        "long": {"values": {str(number): number for number in range(200)}},
        "names": ["a", "b", "c", "d", "e"],
    }
    found = lines(report(world_size=1, ranks=[rank(0, **sections)]))
    assert "adapter NOT OK, tensors 128, path out/adapter_model.safetensors" in found
    assert "adapter problem 3 tensors are zero" in found
    assert "sharding version 2, modules 92, by class (Qwen3_5DecoderLayer 64), even yes" in found
    assert "steps pairs 2, norm 0.2861" in found
    assert "names a, b, c and 2 more" in found
    assert not any("empty" in line for line in found)
    assert "... (all of it is in the file)" in " ".join(found)


def test_a_section_that_only_rank_0_has_needs_no_rank() -> None:
    ranks = [rank(number, adapter=None) for number in range(8)]
    ranks[0]["adapter"] = {"ok": True, "tensors": 128, "warnings": ["no config beside it"]}
    found = lines(report(ranks=ranks))
    assert "adapter ok, tensors 128" in found and "adapter warning no config beside it" in found


def test_kernels_have_a_line_per_replaced_operator_whatever_the_digits_of_each_rank() -> None:
    def section(error: float) -> dict[str, Any]:
        counts = {"backends": ["torch_npu"], "modules": 14, "called": 14}
        probe = {"errors": {"output": error / 2, "d_0": error}}
        switches = [{"operator": "rope", "probe": probe}, {"operator": "rope", "probe": None}]
        return {
            "family": "qwen3",
            "choices": {"rope": {}},
            "attested": {"rope": counts},
            "switches": switches,
        }

    found = lines(report(ranks=[rank(0, kernels=section(0.0025)), rank(1, kernels=section(0.0026))]))
    assert [line for line in found if "kernels" in line] == [
        "kernels rope torch_npu, called by 14 of 14 modules, within 1 % of the old code"
    ]
    nothing = {"family": "qwen3", "choices": {"rope": {}}, "attested": None, "switches": []}
    assert not any("kernels" in line for line in lines(report(ranks=[rank(0, kernels=nothing)])))


def test_targets_are_one_line() -> None:
    targets = {
        "from": "lora_target",
        "modules": {"text": 28, "vision": 10},
        "trainable": {"text": 7168, "vision": 2688},
        "parameters": 481216,
        "percent": 2.0481,
    }
    found = " ".join(lines(report(ranks=[rank(0, targets=targets)])))
    assert "targets text 28, vision 10 modules by lora_target, 9,856 trainable of 481,216 (2.048 %)" in found


def test_gradients_are_ok_where_each_has_one_or_a_reason() -> None:
    reason = "its lora_B is still zero, so its gradient is exactly zero"
    audit = {
        "trainable": 16,
        "without_gradient": {reason: {"tensors": 8, "examples": ["a"]}},
        "unexplained": [],
        "problems": [],
    }
    excused = f"or with a reason (8: {reason})"
    found = " ".join(lines(report(ranks=[rank(0, gradients=audit)])))
    assert f"gradients ok, 16 trainable, all with a gradient {excused}" in found
    audit |= {"unexplained": ["b"], "problems": ["1 of 16 trainable tensors learn nothing"]}
    found = " ".join(lines(report(ranks=[rank(0, gradients=audit)])))
    assert f"gradients NOT OK, 16 trainable, not all with a gradient {excused}" in found
    assert "gradients problem 1 of 16 trainable tensors learn nothing" in found


def test_checkpoints_are_counted_and_the_last_one_named() -> None:
    checkpoints = {f"checkpoint-{step}": {"ok": step != 2, "sha256": f"f00{step}"} for step in (1, 2, 3)}
    adapter = {"ok": True, "tensors": 8, "checkpoints": checkpoints}
    found = " ".join(lines(report(world_size=1, ranks=[rank(0, adapter=adapter)])))
    assert "adapter ok, tensors 8, checkpoints 2 of 3 ok, the last checkpoint-3 f003" in found
    assert "f001" not in found


def test_environment_variables_share_a_row_and_no_name_folds() -> None:
    variable = {"choice": "expandable_segments:True", "reason": "default of the plugin"}
    found = lines(report(decisions={"environment.PYTORCH_NPU_ALLOC_CONF": variable}))
    assert "environment PYTORCH_NPU_ALLOC_CONF=expandable_segments:True (default of the plugin)" in found


def test_a_patch_whose_function_this_host_lacks_is_not_needed() -> None:
    patches = [patch("a"), patch("kernels.host_patch", "skipped", "x:f does not exist", source="")]
    found = lines(report(patches=patches))
    assert "patches 1 of 2 in place on every rank; not needed here: kernels.host_patch" in found
    assert not any(line.startswith("patch kernels.host_patch") for line in found)


def test_a_finding_names_its_subject_once() -> None:
    finding = {"level": "warning", "subject": "plugin", "message": "plugin `x` is off"}
    assert "warning plugin `x` is off" in lines(report(findings=[finding]))


def test_a_failure() -> None:
    memory = {"allocated": MIB, "reserved": 2 * MIB, "peak_allocated": 3 * MIB, "peak_reserved": 4 * MIB}
    first = {"rank": 1, "phase": "backward", "step": 3, "type": "OutOfMemoryError", "headline": "no"}
    failures = [{**first, "memory": memory}, {**first, "rank": 0, "memory": None}]
    found = lines(report(state="failed", explanation="why", failures=failures, last_step=3))
    assert found[:6] == [
        "llamafactory-ascend: failed",
        "explanation why",
        "steps 3 of 4",
        "device 8 ranks, Ascend910B3",
        "memory (rank 1) allocated 1.0 MiB, reserved 2.0 MiB, peak allocated 3.0 MiB, peak reserved 4.0 MiB",
        "then rank 0 failed in backward after step 3: OutOfMemoryError: no",
    ]


def test_patches_that_are_not_in_place() -> None:
    patches = [
        patch("a"),
        patch("b", "failed", "refused"),
        patch("c", "planned"),
        patch("d", "skipped", "fixed in 1.0"),
    ]
    differences = [
        {"id": "a", "harmful": True, "states": {"hit": "0", "failed: gone": "1-7"}},
        {"id": "z", "harmful": False, "states": {"hit": "0", "verified": "1-7"}},
    ]
    found = lines(report(patches=patches, patch_differences=differences))
    start = found.index("patches 1 of 4 in place on rank 0, others differ; not needed here: c")
    assert found[start + 1 : start + 4] == [
        "patch b failed: refused",
        "patch d skipped: fixed in 1.0",
        "patch a rank 0 hit; rank 1-7 failed: gone",
    ]


def test_brackets_and_chinese_are_text() -> None:
    found = report(
        findings=[{"level": "warning", "subject": "data", "message": "row 3 [/bold] 数据 :smile:"}]
    )
    assert "warning data: row 3 [/bold] 数据 :smile:" in lines(found)


def test_no_line_is_wider_than_a_log_or_ends_in_blanks() -> None:
    found = report(
        explanation="word " * 60, findings=[{"level": "note", "subject": "x" * 200, "message": "y" * 300}]
    )
    text = draw(found, Path("/" + "long/" * 60), io.StringIO())
    *drawn, path = text.splitlines()
    assert max(map(len, drawn)) <= 110 and path.endswith("/long")  # a path stays whole, to be copied
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_refusal_is_said_once() -> None:
    findings = [
        {"level": "error", "subject": "attention", "message": "fa2 fails"},
        {"level": "error", "subject": "adapter", "message": "of zeros"},
        {"level": "warning", "subject": "data", "message": "few rows"},
    ]
    refused = report(state="refused", explanation="attention: fa2 fails", findings=findings)
    assert [line for line in lines(refused) if "fa2" in line] == ["explanation attention: fa2 fails"]
    assert {"error adapter: of zeros", "warning data: few rows"} <= set(lines(refused))
    assert "error attention: fa2 fails" in lines(report(state="failed", explanation="x", findings=findings))
