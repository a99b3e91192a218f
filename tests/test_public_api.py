"""What `import kvferry` promises: names that are there, typed and documented, and that cost nothing until used."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvferry

MODULES = ("kvferry", "kvferry.layout", "kvferry.kv_transfer_params", "kvferry.options", "kvferry.devices")
API_PAGE = Path(__file__).parent.parent / "docs" / "api.md"

ONLY_NUMPY_AND_MSGSPEC = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in ("kvferry", "numpy", "msgspec", "_numpy") and root not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {root!r}", name=root)

sys.meta_path.insert(0, Refusing())
"""


def run(script: str) -> str:
    """What a new interpreter says."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def typed_names() -> dict[str, str]:
    """What a type checker sees: names, and the modules that they come from."""
    tree = ast.parse(Path(kvferry.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = [node for node in imports if node.module.startswith("kvferry.") and node.module != "kvferry.extras"]
    return {each.asname: node.module for node in ours for each in node.names}


def test_a_type_checker_sees_what_is_there():
    assert typed_names() == {**kvferry._HOME, "__version__": "kvferry.version"}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_there_and_in_the_documentation(module):
    found = import_module(module)
    page = API_PAGE.read_text(encoding="utf-8")
    names = [name for name in found.__all__ if name != "__version__"]
    assert names
    for name in names:
        assert getattr(found, name) is not None
        assert name in page, f"{module}.{name} is not in docs/api.md"


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = kvferry.nope
    assert set(kvferry.__all__) <= set(dir(kvferry))


def test_the_import_loads_no_library():
    libraries = "'numpy', 'msgspec', 'zmq', 'torch', 'xxhash', 'asyncio', 'typer'"
    assert run(f"import sys, kvferry; print([name for name in ({libraries},) if name in sys.modules])") == "[]\n"


def test_a_cache_is_described_with_numpy_and_msgspec_alone():
    said = run(
        ONLY_NUMPY_AND_MSGSPEC
        + "from kvferry import layout, kv_transfer_params, LeaseRequest, Prompt, allocate_shared\n"
        + "shape = layout.EngineShape(2, 1, block_tokens=4, num_blocks=8, format='token-major')\n"
        + "print(len(layout.describe(layout.attention(2, 2, 8, 'float32', 4), shape, 0)))"
    )
    assert said == "2\n"


def test_a_missing_library_is_one_line_that_says_what_to_install():
    said = run(
        ONLY_NUMPY_AND_MSGSPEC
        + "import kvferry\nfrom kvferry.errors import ConfigurationError\n"
        + "try:\n    kvferry.Agent\nexcept ConfigurationError as error:\n    print(error)"
    )
    assert "is not installed: pip install 'kvferry[agent]'" in said
    assert said.count("\n") == 1
