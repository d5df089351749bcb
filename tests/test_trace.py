"""Profiler traces: synthetic ones with known answers, real ones of gloo ranks, and bad files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl.errors import DataError
from fast_axolotl.plan.kineto import read_trace
from fast_axolotl.plan.trace import StepParts, TraceSummary, summarise_traces
from support.golden import command

DATA = Path(__file__).parent / "data"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    place = {"pid": 1, "tid": tid, "ts": ts, "dur": dur}
    return {"ph": "X", "cat": cat, "name": name, **place, "args": args}


class Gpu:
    """A trace of one rank: every kernel is launched by the CPU, at a time of its own."""

    def __init__(self, rank: int = 0, world_size: int = 2, **info: Any) -> None:
        self.info = {"backend": "nccl", "rank": rank, "world_size": world_size, **info}
        self.events: list[Event] = []
        self.launched = 0

    def step(self, number: int, ts: float, dur: float) -> None:
        self.events.append(event("user_annotation", f"ProfilerStep#{number}", ts, dur))

    def kernel(
        self, name: str, ts: float, dur: float, launch: float | None = None, **args: Any
    ) -> None:
        cat, stream = args.pop("cat", "kernel"), args.pop("stream", 7)
        self.launched += 1
        args |= {"correlation": self.launched, "device": 0, "stream": stream}
        when = ts if launch is None else launch
        call = event("cuda_runtime", "cudaLaunchKernel", when, 1, correlation=self.launched)
        self.events += [call, event(cat, name, ts, dur, stream, **args)]

    def all_reduce(self, ts: float, dur: float, **args: Any) -> None:
        size, count = self.info["world_size"], 1_000_000
        ranks = str(list(range(size)))
        given_args = {"Group size": size, "Process Group Name": "0", "Process Group Ranks": ranks}
        given_args |= {"Collective name": "allreduce", "dtype": "Float"}
        given_args |= {"In msg nelems": count, "Out msg nelems": count}
        self.kernel(NCCL, ts, dur, stream=20, **(given_args | args))

    def save(self, folder: Path, name: str = "") -> Path:
        path = folder / (name or f"rank{self.info['rank']}.json")
        found = {"schemaVersion": 1, "distributedInfo": self.info, "traceEvents": self.events}
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
        return path


def microseconds(step: StepParts) -> dict[str, float]:
    names = ("", "compute_", "overlapped_", "exposed_", "copy_", "idle_")
    return {f"{n}seconds": round(1e6 * getattr(step, f"{n}seconds"), 3) for n in names}


def parts_of(*traces: Path) -> list[dict[str, float]]:
    return [microseconds(step) for step in summarise_traces(traces).steps]


def summary_of(folder: Path) -> TraceSummary:
    return summarise_traces(sorted(folder.glob("*.json")))


def two_steps(**info: Any) -> Gpu:
    """100 µs each: 40 compute, 20 both, 15 exposed, 5 copies, 20 idle; the CPU runs ahead."""
    trace = Gpu(**info)
    for index in (0, 1):
        at, ahead = 1000 + 100 * index, 900 + 100 * index
        trace.step(index + 3, ahead, 99)
        trace.kernel("gemm", at, 40, launch=ahead + 1)
        trace.kernel("gemm", at + 40, 20, launch=ahead + 2)
        trace.all_reduce(at + 40, 35)
        trace.events[-2]["ts"] = ahead + 3
        trace.kernel("Memcpy HtoD", at + 70, 10, launch=ahead + 4, cat="gpu_memcpy", stream=9)
    trace.step(5, 1100, 95)
    trace.kernel("gemm", 1200, 30, launch=1101)
    return trace


def test_the_parts_of_a_step_are_those_on_the_device_and_add_up(tmp_path: Path) -> None:
    steps = parts_of(two_steps().save(tmp_path))
    assert [list(step.values()) for step in steps[:2]] == [[100, 40, 20, 15, 5, 20]] * 2
    # The last step ends with its last kernel, or with the CPU's step.
    assert (steps[2]["seconds"], steps[2]["compute_seconds"]) == (30, 30)


def test_a_kernel_that_runs_in_the_next_step_is_cut_at_the_window(tmp_path: Path) -> None:
    trace = Gpu(world_size=1)
    trace.step(1, 0, 100)
    trace.step(2, 100, 100)
    trace.kernel("a", 10, 20)
    trace.kernel("slow", 20, 100, launch=40, stream=8)
    trace.kernel("b", 110, 10)
    first, second = parts_of(trace.save(tmp_path))
    assert (first["seconds"], first["compute_seconds"], first["idle_seconds"]) == (100, 100, 0)
    assert (second["seconds"], second["compute_seconds"]) == (90, 10)


def test_without_steps_all_is_one_and_what_follows_the_last_is_not(tmp_path: Path) -> None:
    trace = Gpu(world_size=1)
    trace.kernel("a", 10, 20)
    trace.kernel("b", 150, 10)
    assert list(parts_of(trace.save(tmp_path))[0].values()) == [150, 30, 0, 0, 0, 120]
    trace.step(1, 0, 100)
    assert list(parts_of(trace.save(tmp_path))[0].values()) == [90, 20, 0, 0, 0, 70]


def test_traces_have_to_fit_together(tmp_path: Path) -> None:
    path = two_steps().save(tmp_path)
    again = two_steps().save(tmp_path, "again.json")
    other = two_steps(rank=1, world_size=4).save(tmp_path)
    with pytest.raises(DataError, match=r"rank0\.json is also of rank 0"):
        summarise_traces([path, again])
    with pytest.raises(DataError, match=r"jobs of \[2, 4\] ranks"):
        summarise_traces([path, other])


kernels = st.tuples(
    st.sampled_from(["gemm", NCCL, "Memcpy HtoD"]), st.integers(0, 400), st.integers(0, 60)
)


@given(st.lists(kernels, min_size=1, max_size=30))
def test_parts_equal_those_counted_by_the_microsecond(
    tmp_path_factory: pytest.TempPathFactory, kernels: list[tuple[str, int, int]]
) -> None:
    trace = Gpu(world_size=1)
    held: dict[str, set[int]] = {"gemm": set(), NCCL: set(), "Memcpy HtoD": set()}
    for name, start, length in kernels:
        trace.kernel(name, start, length, cat="gpu_memcpy" if name.startswith("Mem") else "kernel")
        held[name] |= set(range(start, start + length))
    compute, communication, copies = held.values()
    first = min(start for _, start, _ in kernels)
    whole = set(range(first, max(start + length for _, start, length in kernels)))
    (step,) = parts_of(trace.save(tmp_path_factory.mktemp("trace")))
    assert step == {
        "seconds": len(whole),
        "compute_seconds": len(compute - communication),
        "overlapped_seconds": len(compute & communication),
        "exposed_seconds": len(communication - compute),
        "copy_seconds": len(copies - compute - communication),
        "idle_seconds": len(whole - compute - communication - copies),
    }


# Names of communication.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernel)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevComm*, unsigned long)", "broadcast"),
        ("ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)", "all_reduce"),
        ("rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)", "other"),
        ("void c10d::symmetric_memory::multimem_one_shot_all_reduce_kernel<c10>()", "all_reduce"),
        ("nvshmemi_alltoall_kernel(int)", "all_to_all"),
        ("Memcpy PtoP (Device -> Device)", "other"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop_sm", "reduce_scatter"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_ag", "all_gather"),
        ("kuserbuffers_pushsend", "send"),
        ("triton_symm_mem_one_shot_all_reduce_kernel", "all_reduce"),
    ],
)
def test_communication_kernels_of_every_library_are_recognised(
    tmp_path: Path, name: str, kind: str
) -> None:
    trace = Gpu()
    trace.kernel("gemm", 0, 10)
    trace.kernel(name, 10, 10, cat="gpu_memcpy" if "Memcpy" in name else "kernel")
    summary = summarise_traces([trace.save(tmp_path)])
    assert [row.kind for row in summary.collectives] == [kind]
    assert microseconds(summary.steps[0])["exposed_seconds"] == 10


def test_a_job_without_communication_that_we_know_is_refused(tmp_path: Path) -> None:
    for name in (
        "triton_poi_fused_all_gather_into_tensor_add_3",
        "moe_all_to_all_permute_kernel<128>(float*)",
        "void softmax_warp_forward<WarpAllReduce>(float*)",
        "void block_all_reduce_sum<float>(float*)",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8>(int)",
        "Memcpy DtoD (Device -> Device)",
    ):
        trace = Gpu()
        trace.kernel(name, 0, 10)
        trace.kernel("gemm", 20, 5)
        with pytest.raises(DataError, match=r"of 2 ranks holds no communication.*longest") as error:
            summarise_traces([trace.save(tmp_path)])
        assert name[:60] in str(error.value)
        trace.info["world_size"] = 1
        assert parts_of(trace.save(tmp_path))[0]["exposed_seconds"] == 0


# Collectives.


def test_rows_join_collectives_of_one_kind_group_and_size(tmp_path: Path) -> None:
    trace = Gpu(world_size=4)
    names = {"allreduce": "all_reduce", "_allgather_base": "all_gather", "send": "send"}
    names |= {"_reduce_scatter_base": "reduce_scatter", "all_to_allv": "all_to_all"}
    for index, name in enumerate(names):
        trace.all_reduce(200 * index, 100, **{"Collective name": name, "In msg nelems": 250_000})
    summary = summarise_traces([trace.save(tmp_path)])
    assert {row.kind for row in summary.collectives} == set(names.values())
    for row in summary.collectives:
        assert (row.message, row.group_size) == ("1,000,000 Float", 4)
        assert row.waiting_seconds is None


def skewed(folder: Path, ranks: Iterable[int], late: int = 1, **args: Any) -> TraceSummary:
    """Three steps of four ranks; ``late`` comes 300 µs after the others, on a clock of its own."""
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        trace = Gpu(rank, 4)
        clock = 1e6 * (rank + 1)
        for index in range(3):
            at = clock + 1000 * index
            delay = 300 if rank == late else 0
            trace.step(index + 1, at, 999)
            trace.kernel("gemm", at + 10, 90)
            more = {name: values[index] for name, values in args.items()}
            trace.all_reduce(at + 100 + delay, 500 - delay, **more)
        trace.save(folder)
    return summary_of(folder)


@pytest.mark.parametrize("args", [{}, {"Seq": [7, 8, 9]}], ids=["order", "sequence"])
def test_waiting_for_peers_is_told_from_transfer_without_a_common_clock(
    tmp_path: Path, args: dict[str, Sequence[int]]
) -> None:
    summary = skewed(tmp_path, range(4), **args)
    waits = [mean.waiting_seconds for mean in summary.ranks]
    assert waits == pytest.approx([300e-6, 0, 300e-6, 300e-6])
    exposed = [mean.exposed_seconds for mean in summary.ranks]
    assert exposed == pytest.approx([500e-6, 200e-6, 500e-6, 500e-6])
    assert summary.straggler == 1
    (row,) = summary.collectives
    assert row.count == 12
    assert row.waiting_seconds == pytest.approx(9 * 300e-6)
    assert summary.notes == ("The last step, which ends as the GPU drains, is not in the mean.",)


def test_missing_ranks_are_named_and_a_straggler_needs_ranks_that_wait(tmp_path: Path) -> None:
    summary = skewed(tmp_path / "two", (0, 1))
    assert summary.missing_ranks == (2, 3)
    assert summary.ranks[0].waiting_seconds == pytest.approx(300e-6)
    assert "2 of 4 ranks have no trace here: waiting for peers is at least" in summary.notes[-1]
    summary = skewed(tmp_path / "one", (2,))
    assert (summary.ranks[0].waiting_seconds, summary.straggler) == (None, None)
    assert "Waiting is not known for 3 collectives" in summary.notes[0]
    summary = skewed(tmp_path / "all", range(4), late=9)
    assert summary.straggler is None
    assert summary.straggler_reason.startswith("No rank clearly makes")


def test_groups_of_the_same_name_and_other_ranks_are_not_mixed(tmp_path: Path) -> None:
    for rank, length in enumerate((500, 200, 900, 100)):
        trace = Gpu(rank, 4)
        pair = str([rank // 2 * 2, rank // 2 * 2 + 1])
        trace.all_reduce(0, length, **{"Process Group Ranks": pair, "Group size": 2})
        trace.save(tmp_path)
    summary = summary_of(tmp_path)
    waits = [mean.waiting_seconds for mean in summary.ranks]
    assert waits == pytest.approx([300e-6, 0, 800e-6, 0])


def test_collectives_that_differ_between_ranks_are_not_matched(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = Gpu(rank)
        for index in range(3 - rank):
            trace.all_reduce(1000 * index, 500)
        trace.all_reduce(5000, 100, **{"Collective name": "send"})
        trace.save(tmp_path)
    summary = summary_of(tmp_path)
    assert [mean.waiting_seconds for mean in summary.ranks] == [None, None]
    assert "Waiting is not known for 7 collectives: sends" in summary.notes[0]


def test_one_step_without_a_match_does_not_empty_the_mean(tmp_path: Path) -> None:
    for rank in (0, 1):
        trace = Gpu(rank)
        for index in range(4):
            trace.step(index, 1000 * index, 999)
            trace.all_reduce(1000 * index, 500 - 300 * rank)
        trace.all_reduce(1600 + 10 * rank, 50) if rank else None
        trace.save(tmp_path)
    summary = summary_of(tmp_path)
    unknown = [index for index in range(4) if summary.steps[index].waiting_seconds is None]
    assert unknown == [1]
    assert [mean.waiting_seconds for mean in summary.ranks] == pytest.approx([300e-6, 0])


def test_waiting_under_compute_is_not_exposed(tmp_path: Path) -> None:
    for rank, length in enumerate((500, 100)):
        trace = Gpu(rank)
        trace.kernel("gemm", 0, 250)
        trace.all_reduce(100, length)
        trace.save(tmp_path)
    first, _ = summary_of(tmp_path).steps
    assert microseconds(first)["overlapped_seconds"] == 150
    # 400 µs of waiting from 100 on, 150 of them under the kernel.
    assert first.waiting_seconds == pytest.approx(250e-6)


def test_idle_time_is_split_into_waiting_for_the_host_and_between_kernels(tmp_path: Path) -> None:
    trace = Gpu(world_size=1)
    trace.step(1, 0, 200)
    for start, launch in ((10, 5), (40, 6), (100, 90)):
        trace.kernel("gemm", start, 20, launch=launch)
    trace.step(2, 200, 100)
    trace.kernel("gemm", 200, 20)
    first, last = summarise_traces([trace.save(tmp_path)]).steps
    # 10 µs after the first kernel, launched in time; 40 and 80 before work that came late.
    assert microseconds(first)["idle_seconds"] == pytest.approx(130)
    assert first.host_seconds == pytest.approx(120e-6)
    assert last.seconds == pytest.approx(100e-6)
    (mean,) = summarise_traces([tmp_path / "rank0.json"]).ranks
    assert mean.seconds == first.seconds  # the last step, which drains, is not in the mean


# Files.


def test_a_real_trace_agrees_with_holistic_trace_analysis() -> None:
    """Rank 0 of 128, from HolisticTraceAnalysis's tests (MIT); its 0.5.0 gives these figures."""
    (step, _) = summarise_traces([DATA / "hta-128ranks-rank0.json.gz"]).steps
    found = microseconds(step)
    assert found["compute_seconds"] + found["overlapped_seconds"] == 106_252
    assert found["exposed_seconds"] + found["copy_seconds"] == 172_428
    share = found["overlapped_seconds"] / (found["overlapped_seconds"] + found["exposed_seconds"])
    assert round(100 * share, 2) == 11.81


def test_plain_gzip_and_bare_lists_are_read_alike(tmp_path: Path) -> None:
    plain = two_steps().save(tmp_path)
    packed = tmp_path / "rank0.pt.trace.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    bare = tmp_path / "bare_rank-0.json"
    bare.write_text(json.dumps(json.loads(plain.read_text())["traceEvents"]))
    assert parts_of(plain) == parts_of(packed) == parts_of(bare)
    assert summarise_traces([bare]).world_size is None


EVENT = b'{"traceEvents": [{"ph": "M"}'
KERNEL = b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a"'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "after 0 events: .* this is not JSON"),
        (b'{"traceEvents": 3}', "no list of traceEvents"),
        (b'{"traceEvents": []}', r"no GPU kernels.*ProfilerActivity\.CUDA"),
        (EVENT + b', {"ph": "X", "na', "after 1 event: the file is truncated here"),
        (KERNEL + b"}]}", r"event 1.*KeyError\('ts'"),
        (KERNEL + b', "ts": "b"}]}', "event 1"),
        (gzip.compress(EVENT + b", {}" * 99, mtime=0)[:-20], "the file"),
    ],
)
def test_files_that_are_no_traces_are_errors_with_a_place(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read_trace(path)
    assert error.value.path == str(path)


# The command.


def test_the_command_shows_ranks_steps_and_collectives_and_bad_calls_are_one_line(
    tmp_path: Path,
) -> None:
    skewed(tmp_path, range(4))
    done = command("trace", str(tmp_path))
    assert done.code == 0, done.err
    assert "Straggler: rank 1." in done.out
    assert "all_reduce" in done.out
    found = command("trace", str(tmp_path / "rank[01].json"), "--json").json()
    assert [mean["rank"] for mean in found["ranks"]] == [0, 1]
    done = command("trace", "nowhere.json")
    assert (done.code, done.err.count("\n"), "nowhere.json" in done.err) == (1, 1, True)
