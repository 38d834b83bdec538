"""Twenty ordinary notebooks, as people and agents write them. Each checks its own results with asserts.

Used twice: inside the sandbox in every run, and with the plain local provisioner in the long run, so
that "runs unchanged" is not a figure of speech.
"""

from __future__ import annotations

NOTEBOOKS: dict[str, list[str]] = {
    "pandas": [
        "import pandas as pd\ndf = pd.read_csv('people.csv')\ndf.head()",
        "totals = df.groupby('city')['amount'].sum()\nassert totals['Bern'] == 30.5, totals\ntotals",
        "df.to_csv('copy.csv', index=False)\nassert len(pd.read_csv('copy.csv')) == 3",
        "with pd.ExcelWriter('book.xlsx') as writer:\n    df.to_excel(writer, index=False)\n"
        "assert list(pd.read_excel('book.xlsx').columns) == ['name', 'city', 'amount']",
    ],
    "polars": [
        "import polars as pl\ndf = pl.read_csv('people.csv')\nassert df.height == 3",
        "out = df.lazy().group_by('city').agg(pl.col('amount').sum()).collect()\nassert out.height == 2\nout",
        "df.write_parquet('people.parquet')\nassert pl.scan_parquet('people.parquet').collect().equals(df)",
    ],
    "matplotlib": [
        "import matplotlib.pyplot as plt\nimport numpy as np",
        "fig, ax = plt.subplots()\nax.plot(np.arange(10) ** 2)\nax.set_title('Größe')\nplt.show()",
        "fig.savefig('plot.png')\nassert open('plot.png', 'rb').read(4) == b'\\x89PNG'",
    ],
    "scikit-learn": [
        "from sklearn.datasets import load_iris\nfrom sklearn.ensemble import RandomForestClassifier\n"
        "X, y = load_iris(return_X_y=True)\n"
        "model = RandomForestClassifier(n_estimators=20, n_jobs=2, random_state=0).fit(X, y)\n"
        "assert model.score(X, y) > 0.95",
    ],
    "multiprocessing": [
        "import multiprocessing as mp, math",
        "with mp.get_context('fork').Pool(2) as pool:\n    assert pool.map(math.sqrt, [1, 4, 9]) == [1, 2, 3]",
        "with mp.get_context('spawn').Pool(2) as pool:\n    assert pool.map(math.sqrt, [1, 4, 9]) == [1, 2, 3]",
        "with mp.get_context('forkserver').Pool(2) as pool:\n    assert pool.map(math.sqrt, [4]) == [2]",
        "from multiprocessing import shared_memory\nshm = shared_memory.SharedMemory(create=True, size=50 << 20)\n"
        "shm.buf[:5] = b'hello'\nassert bytes(shm.buf[:5]) == b'hello'\nshm.close(); shm.unlink()",
        "lock = mp.Lock()\nwith lock: pass",
    ],
    "joblib": [
        "from joblib import Parallel, delayed, Memory\nassert Parallel(n_jobs=2)(delayed(pow)(i, 2) for i in range(5)) "
        "== [0, 1, 4, 9, 16]",
        "memory = Memory('cache', verbose=0)\n@memory.cache\ndef f(x):\n    return x + 1\nassert f(1) == f(1) == 2",
    ],
    "concurrent": [
        "from concurrent.futures import ThreadPoolExecutor, ProcessPoolExecutor\nimport operator, functools",
        "with ThreadPoolExecutor(8) as pool:\n    assert sum(pool.map(functools.partial(operator.mul, 2), range(100))) == 9900",
        "with ProcessPoolExecutor(2) as pool:\n    assert list(pool.map(abs, [-1, -2])) == [1, 2]",
    ],
    "sqlite": [
        "import sqlite3\ncon = sqlite3.connect('db.sqlite')\ncon.execute('pragma journal_mode=wal')\n"
        "con.execute('create table t (x)')\ncon.executemany('insert into t values (?)', [(i,) for i in range(1000)])\n"
        "con.commit()\nassert con.execute('select sum(x) from t').fetchone() == (499500,)\ncon.close()",
    ],
    "subprocess": [
        "import subprocess, sys\nassert subprocess.check_output(['echo', 'hi'], text=True) == 'hi\\n'",
        "out = subprocess.run([sys.executable, '-c', 'print(1 + 1)'], capture_output=True, text=True)\n"
        "assert out.stdout == '2\\n', out",
        "assert subprocess.run('exit 3', shell=True).returncode == 3",
        "p = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "assert p.communicate(b'abc')[0] == b'abc'",
    ],
    "asyncio": [
        "import asyncio\nawait asyncio.sleep(0.01)",
        "async def work(i):\n    await asyncio.sleep(0.01)\n    return i\n"
        "assert await asyncio.gather(*(work(i) for i in range(5))) == [0, 1, 2, 3, 4]",
        "async def handle(reader, writer):\n    writer.write(await reader.readline())\n    writer.close()\n"
        "server = await asyncio.start_unix_server(handle, path='echo.sock')\n"
        "reader, writer = await asyncio.open_unix_connection('echo.sock')\n"
        "writer.write(b'ping\\n')\nassert await reader.readline() == b'ping\\n'\nwriter.close(); server.close()",
        "server = await asyncio.start_server(handle, '127.0.0.1', 0)\n"
        "reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())\n"
        "writer.write(b'tcp\\n')\nassert await reader.readline() == b'tcp\\n'\nwriter.close(); server.close()",
    ],
    "pip-list": ["%pip list", "import importlib.metadata as m\nassert m.version('ipykernel')"],
    "shell-lines": [
        "!ls -la",
        "files = !ls\nassert 'people.csv' in files, files",
        "!python3 --version\nassert _exit_code == 0",
        "%pwd",
    ],
    "bash-cell": [
        "%%bash\nset -e\nmkdir -p sub\nfor i in 1 2 3; do echo $i >> sub/list.txt; done\nsort -r sub/list.txt | head -1\n"
        "git init -q repo 2>/dev/null || true\ndf . > /dev/null\nmktemp > /dev/null",
        "assert open('sub/list.txt').read() == '1\\n2\\n3\\n'",
    ],
    "large-output": ["print('x' * 2_000_000)", "for i in range(3000): print('line', i)", "'y' * 100_000"],
    "threads": [
        "import threading, queue\nq = queue.Queue()\n"
        "threads = [threading.Thread(target=lambda i=i: q.put(i)) for i in range(50)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\nassert q.qsize() == 50",
        "import numpy as np\na = np.random.default_rng(0).normal(size=(500, 500))\nassert np.isfinite(a @ a).all()",
    ],
    "locale": [
        "import locale, sys\nassert sys.stdout.encoding.lower().replace('-', '') == 'utf8'",
        "print('Zürich – 東京 🧤')",
        "locale.setlocale(locale.LC_ALL, '')\nassert locale.getpreferredencoding().lower().replace('-', '') == 'utf8'",
        "open('naïve-文件.txt', 'w', encoding='utf-8').write('ü')\nimport os\nassert 'naïve-文件.txt' in os.listdir('.')",
    ],
    "time-zones": [
        "from datetime import datetime, timezone\nfrom zoneinfo import ZoneInfo",
        "t = datetime(2026, 7, 1, 12, tzinfo=ZoneInfo('Europe/Zurich'))\nassert t.utcoffset().total_seconds() == 7200",
        "import pandas as pd\nassert pd.Timestamp('2026-01-01', tz='America/New_York').utcoffset().total_seconds() == -18000",
        "import time\ntime.localtime(); datetime.now().astimezone()",
    ],
    "user": [
        "import getpass, pwd, os, pathlib, tempfile\nname = getpass.getuser()\nassert name",
        "entry = pwd.getpwuid(os.getuid())\nassert entry.pw_dir == os.path.expanduser('~') == str(pathlib.Path.home())",
        "(pathlib.Path.home() / '.config').mkdir(exist_ok=True)",
        "with tempfile.NamedTemporaryFile() as f: f.write(b'x')",
        "assert os.getcwd() == os.path.abspath('.') and os.access('.', os.W_OK)",
    ],
    "introspection": [
        "import json\njson.dumps?",
        "%timeit -n 10 -r 2 sum(range(100))",
        "%env HOME",
        "from IPython.display import display, HTML, Markdown, Image\ndisplay(HTML('<b>x</b>'), Markdown('*y*'))",
        "import os, psutil\nassert os.cpu_count() >= 1 and psutil.Process().memory_info().rss > 0",
        "%load_ext autoreload\n%autoreload 2",
    ],
    "numpy-files": [
        "import numpy as np\na = np.arange(1_000_000, dtype='f8')\nnp.save('a.npy', a)\n"
        "m = np.load('a.npy', mmap_mode='r')\nassert m[-1] == 999_999",
        "import zipfile, gzip, shutil, pathlib\nwith zipfile.ZipFile('z.zip', 'w') as z: z.write('a.npy')\n"
        "shutil.copytree('.', '/tmp/copy', dirs_exist_ok=True)\n"
        "pathlib.Path('a.npy').rename('b.npy')\nassert not pathlib.Path('a.npy').exists()",
        "import pyarrow.parquet as pq, pyarrow as pa\npq.write_table(pa.table({'x': a[:10]}), 't.parquet')\n"
        "assert pq.read_table('t.parquet').num_rows == 10",
    ],
}

PEOPLE = b"name,city,amount\nAda,Bern,10.5\nBob,Basel,7\nCy,Bern,20\n"
MANIFEST = "version: 1\nname: ordinary\ninputs: [people.csv]\n"
