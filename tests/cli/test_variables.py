"""Who set which environment variable."""

from llamafactory_ascend.cli.variables import collect, shown


def test_shell_wins_over_the_default_and_each_is_named() -> None:
    shell = {"HCCL_CONNECT_TIMEOUT": "600", "ASCEND_HOME_PATH": "/cann", "HOME": "/root", "NNODES": "2"}
    defaults = {"HCCL_CONNECT_TIMEOUT": "1200", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert [(v.name, v.value, v.setter) for v in collect(shell, defaults)] == [
        ("ASCEND_HOME_PATH", "/cann", "CANN's set_env.sh"),
        ("HCCL_CONNECT_TIMEOUT", "600", "this shell"),
        ("NNODES", "2", "this shell"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "the plugin, when a training starts"),
    ]


def test_a_value_is_shown_in_one_piece_of_text() -> None:
    assert shown("expandable_segments:True, 中") == "expandable_segments:True, 中"
    assert shown("a\x1b[31m\n\udcff") == "a\\x1b[31m\\n\\udcff"  # colours, and a byte that is no text
    assert shown("x" * 20_000) == "x" * 300 + "... (20,000 characters)"
