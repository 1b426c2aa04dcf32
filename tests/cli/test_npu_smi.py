"""The table of npu-smi: cards with health and memory, processes, and lines of another form."""

from llamafactory_ascend.cli.npu_smi import Chip, Process, parse

BUSY = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 95.2        48                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3389 / 65536         |
+===========================+===============+====================================================+
| 12    910B3               | Alarm         | 101.0       51                0    / 0             |
| 0                         | 0000:C2:00.0  | 87          0    / 0          61002/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 12      0                 | 31337         | python3.11 train.py      | 57613                   |
+===========================+===============+====================================================+
"""
# A 310P has no HBM, and its second row holds the physical id too.
INFERENCE = """\
| 1     310P3               | OK            | NA          57                0     / 0            |
| 0       2                 | 0000:03:00.0  | 0           1683 / 44280                           |
"""


def test_cards_and_processes() -> None:
    found = parse(BUSY)
    assert found.chips == (
        Chip(0, 0, 0, "910B3", "OK", 3389, 65536),
        Chip(12, 0, 12, "910B3", "Alarm", 61002, 65536),
    )
    assert found.processes == (Process(12, 0, 31337, "python3.11 train.py", 57613),)
    assert found.device(12, 0) == 12


def test_card_without_hbm() -> None:
    assert parse(INFERENCE).chips == (Chip(1, 0, 2, "310P3", "OK", 1683, 44280),)


# Atlas A3: a card has two chips, which are two devices.
TWO_CHIPS = """\
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 1     Ascend910           | OK            | 167.2       36                0    / 0             |
| 0     2                   | 0000:9D:00.0  | 0           0    / 0          3116 / 65536         |
+------------------------------------------------------------------------------------------------+
| 1     Ascend910           | Warning       | -           37                0    / 0             |
| 1     3                   | 0000:9F:00.0  | 0           0    / 0          2880 / 65536         |
+===========================+===============+====================================================+
| 1       1                 | 4711          | python                   | 2817                    |
"""


def test_two_chips_on_a_card_are_two_devices() -> None:
    found = parse(TWO_CHIPS)
    assert found.chips == (
        Chip(1, 0, 2, "Ascend910", "OK", 3116, 65536),
        Chip(1, 1, 3, "Ascend910", "Warning", 2880, 65536),
    )
    assert found.processes == (Process(1, 1, 4711, "python", 2817),)
    assert (found.device(1, 1), found.device(7, 0)) == (3, 7)


def test_something_else_is_no_card() -> None:
    assert parse("dcmi module initialize failed. ret is -8005\n\n| a | b |\n") == parse("")
