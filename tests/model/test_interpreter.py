"""Host code whose ways only run time decides: what they disagree on is unknown, and no way wins in silence."""

import textwrap

import pytest

from moe_lab.model.anatomy import Unknown
from moe_lab.model.interpreter import launches
from moe_lab.problem.contract import ARGUMENTS, Case
from moe_lab.problem.layout import GroupedLayout
from moe_lab.problem.submission import Submission

FILE = """
import tilelang
import tilelang.language as T

KERNELS = {{}}


@tilelang.jit
def build(threads):
    @T.prim_func
    def kernel():
        with T.Kernel(1, threads=threads):
            pass
    return kernel


def pick(sizes):
{body}


def run_kernel({arguments}):
    build(pick(group_sizes))()
"""
RETURNS_KERNEL = """
def pick(sizes):
    if sizes[0] in KERNELS:
        return KERNELS[sizes[0]]
    return build(64)


def run_kernel({arguments}):
    pick(group_sizes)()
"""


def threads_of(source: str) -> object:
    source = source.replace("{arguments}", ", ".join(argument.name for argument in ARGUMENTS))
    (launch,) = launches(Submission(source), Case("two experts", 2, 64, 64, 5), GroupedLayout((2, 3)))
    return launch.threads


def picked(body: str) -> object:
    return threads_of(FILE.format(body=textwrap.indent(textwrap.dedent(body), "    "), arguments="{arguments}"))


UNKNOWN = {
    "an early return": "if sizes[0] > 1:\n    return 64\nreturn 128",
    "a late return": "if sizes[0] > 1:\n    n = 64\nelse:\n    return 128\nreturn n",
    "nested returns": "if sizes[0] > 1:\n    if sizes[1] > 1:\n        return 64\n    return 64\nreturn 128",
    "a loop that nobody can count": "for size in sizes.tolist():\n    if size > 1:\n        return 64\nreturn 128",
    "a return in every turn of it": "for size in sizes.tolist():\n    return 64\nreturn 128",
    "a name that it binds anew": "n = 128\nfor size in sizes.tolist():\n    n = 64\nreturn n",
    "a break": "for n in (64, 128):\n    if sizes[0] > n:\n        break\nreturn n",
    "a break in a while loop": "n = 32\nwhile n < 128:\n    n *= 2\n    if sizes[0] > n:\n        break\nreturn n",
    "a continue": "n = 64\nfor k in (1, 2):\n    if sizes[0] > k:\n        continue\n    n = 128\nreturn n",
    "a break or a continue": (
        "n = 64\nfor k in (1, 2):\n    if sizes[0] > k:\n        n = 128\n        break\n    else:\n        continue\n"
        "return n"
    ),
    "a return or a break": (
        "for n in (64, 128):\n    if sizes[0] > n:\n        return 128\n    else:\n        break\nreturn n"
    ),
}  # fmt: skip
KNOWN = {
    "ways that agree": "if sizes[0] > 1:\n    return 64\nreturn 64",
    "a loop that changes nothing": "n = 64\nfor size in sizes.tolist():\n    n = 64\nreturn n",
    "a name that only a loop binds": "for size in sizes.tolist():\n    n = 64\nreturn n",
    "a break of a known loop": "for n in (32, 64, 128):\n    if n > 32:\n        break\nreturn n",
    "a return of an inner function": (
        "def inner(size):\n    if size > 1:\n        return 1\n    return 2\nunread = inner(sizes[0])\nreturn 64"
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_ways_that_disagree_are_unknown(name: str) -> None:
    threads = picked(UNKNOWN[name])
    assert isinstance(threads, Unknown), threads
    assert "known at run time only" in threads.reason
    assert "size" in threads.reason


@pytest.mark.parametrize("name", KNOWN)
def test_ways_that_agree_are_followed(name: str) -> None:
    assert picked(KNOWN[name]) == 64


def test_a_cache_that_cannot_be_read_holds_what_was_built_for_it() -> None:
    head = FILE.partition("def pick")[0].format()
    assert threads_of(head + RETURNS_KERNEL) == 64
