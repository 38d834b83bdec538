"""jupyter_kernel_test's checks for a Python kernel; `test_peers` runs them in a process of its own."""

from __future__ import annotations

import jupyter_kernel_test


class SandboxedKernelTests(jupyter_kernel_test.KernelTests):
    """What jupyter_kernel_test can check of a kernel, with the default provisioner of the environment."""

    kernel_name = "python3"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('stderr', file=sys.stderr)"
    completion_samples = ({"text": "enumer", "matches": {"enumerate"}},)
    complete_code_samples = ("2 + 2", "x = [1]", "def f():\n    return 1\n\n\n")
    incomplete_code_samples = ("x = '''open", "for i in (1, 2):\n    i")
    invalid_code_samples = ("for = 1",)
    code_page_something = "enumerate?"
    code_generate_error = "raise ValueError('on purpose')"
    code_execute_result = ({"code": "40 + 2", "result": "42"}, {"code": "'a' * 3", "result": "'aaa'"})
    code_display_data = (
        {"code": "from IPython.display import display, HTML; display(HTML('<i>x</i>'))", "mime": "text/html"},
    )
    code_inspect_sample = "len"
    supported_history_operations = ("tail", "search")
    code_history_pattern = "40*"
