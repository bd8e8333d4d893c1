"""A thunk sequence is read as XLA prints it: what a command buffer holds is one graph, all else is launched singly."""

from scripts.graph_report import read_thunks

SEQUENCE = """\
000: kCopy [source | sink] kCopy
001: kCommandBuffer [source | sink] 
    001: kCustomKernel [source       | next=002 (1) ] matvec__1 grid: [64, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
    002: kCustomKernel [prev=001 (1) | next=003 (1) ] matvec grid: [64, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
    003: kGemm         [prev=002 (1) | sink         ] gemm_fusion_3
002: kWhile [source | sink] while
    000: kCustomKernel [source       | sink         ] loop_add_fusion_5 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
003: kCommandBuffer [source | sink] 
    001: kCustomKernel [source       | sink         ] slot_update grid: [1, 1, 1] threads: [32, 1, 1]  shared_memory: 0 bytes
"""  # noqa: E501


def test_graphs_and_single_launches_are_counted_apart():
    report = read_thunks(SEQUENCE)
    assert report["graph_sizes"] == [3, 1]
    assert (report["graphs"], report["launches_in_graphs"], report["single_launches"]) == (2, 4, 3)
    assert report["outside"] == {"kCopy": 1, "while": 1, "loop_add_fusion": 1}
    assert report["in_graphs"] == {"matvec": 2, "gemm_fusion": 1, "slot_update": 1}
    assert report["kinds_in_graphs"] == {"kCustomKernel": 3, "kGemm": 1}
