"""The engines that run SQL over the Parquet files of a dataset."""

import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

import pyarrow as pa

from ..errors import DamagedRecordingError
from ..optional import require
from ..store.layout import is_url
from ..store.object_store import open_store
from .views import partitions, quoted, tables


class Engine(Protocol):
    """Runs SQL, in DuckDB's dialect, over the files of a dataset."""

    name: str

    def add_files(self, table: str, path: str) -> str:
        """Returns the name of the files of a table, in which all columns of `tables` and `partitions` are."""

    def add_view(self, name: str, text: str) -> None:
        """Names the result of a query."""

    def run(self, text: str) -> pa.Table:
        """Returns the rows of a query.

        Raises:
            ValueError: the text is wrong.
            DamagedRecordingError: a file cannot be read.
        """

    def close(self) -> None:
        """Gives back what the engine holds."""


class DuckDB:
    """The engine in this process. What does not fit into its memory goes to a temporary folder."""

    name = "duckdb"

    def __init__(
        self, path: str, *, memory_limit: str | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._duckdb = require("duckdb", "engine='duckdb'")
        self._path = path
        self._spilled = tempfile.TemporaryDirectory(prefix="modtrace-query-")
        config = {"temp_directory": self._spilled.name, "preserve_insertion_order": "false"}
        if memory_limit is not None:
            config["memory_limit"] = memory_limit
        try:
            self._connection = self._duckdb.connect(config=config)
        except self._duckdb.Error as error:
            self._spilled.cleanup()
            raise ValueError(
                f"memory_limit={memory_limit!r}: {_first_line(error)}. Give a size such as 8GB."
            ) from None
        if is_url(path):
            self._connection.register_filesystem(open_store(path, storage_options)[0])

    def add_files(self, table: str, path: str) -> str:
        # A glob for each level, because `**` would take in what else lies there.
        levels = "/".join(f"{name}=*" for name in partitions(table))
        types = ", ".join(f"{name}: {'VARCHAR' if name == 'run' else 'INT'}" for name in partitions(table))
        files = (
            f"SELECT * FROM read_parquet({quoted(f'{_escaped(path)}/{table}/{levels}/*.parquet')}, "
            f"hive_partitioning = true, hive_types = {{{types}}}, union_by_name = true)"
        )
        there = {row[0] for row in self._execute(f"DESCRIBE {files}").fetchall()}
        added = [
            f'CAST(NULL AS {_duckdb_type(field.type)}) AS "{field.name}"'
            for field in tables()[table]
            if field.name not in there  # written before there was such a column
        ]
        self._execute(f"CREATE VIEW files_{table} AS SELECT {', '.join(['*', *added])} FROM ({files})")
        return f"files_{table}"

    def add_view(self, name: str, text: str) -> None:
        self._execute(f"CREATE VIEW {name} AS {text}")

    def run(self, text: str) -> pa.Table:
        duckdb = self._duckdb
        try:
            found = self._connection.sql(text)
            return pa.table({}) if found is None else found.to_arrow_table()
        except duckdb.Error as error:
            raise self._named(error) from None

    def close(self) -> None:
        self._connection.close()
        self._spilled.cleanup()

    def _execute(self, text: str) -> Any:
        try:
            return self._connection.execute(text)
        except self._duckdb.Error as error:
            raise self._named(error) from None

    def _named(self, error: Exception) -> Exception:
        text = str(error).split("\n\nLINE ")[0].rstrip(".")
        if isinstance(error, self._duckdb.OutOfMemoryException):
            return ValueError(
                f"memory_limit=...: {_first_line(error)}. Give a higher one, or ask for fewer steps."
            )
        if self._path in text:
            return DamagedRecordingError(
                f"{text}. Export the run again, or take its files out of the dataset."
            )
        return ValueError(f"DuckDB cannot run this: {text}")


class Spark:
    """The active session of Spark, or else a local one, which `close` ends.

    SQL is translated to Spark's dialect by sqlglot.
    """

    name = "spark"

    def __init__(self, *, memory_limit: str | None = None) -> None:
        sql = require("pyspark.sql", "engine='spark'")
        self._sqlglot = require("sqlglot", "engine='spark'")
        self._errors = require("pyspark.errors", "engine='spark'")
        self._is_ours = sql.SparkSession.getActiveSession() is None
        builder = sql.SparkSession.builder.appName("modtrace")
        if self._is_ours:
            for key, value in _LOCAL_SPARK.items():
                builder = builder.config(key, value)
            builder = builder.config("spark.driver.memory", (memory_limit or "4g").lower().removesuffix("b"))
        self._all = builder.getOrCreate()
        if self._is_ours:
            self._all.sparkContext.setLogLevel("ERROR")
        self._session = self._all.newSession()  # views of ours are of no other session

    def add_files(self, table: str, path: str) -> str:
        types = {**{field.name: field.type for field in tables()[table]}, **partitions(table)}
        columns = ", ".join(f"`{name}` {_spark_type(kind)}" for name, kind in types.items())
        frame = self._session.read.schema(columns).parquet(f"{path}/{table}")
        frame.createOrReplaceTempView(f"files_{table}")
        return f"files_{table}"

    def add_view(self, name: str, text: str) -> None:
        self._session.sql(f"CREATE OR REPLACE TEMPORARY VIEW {name} AS {self._translated(text)}")

    def run(self, text: str) -> pa.Table:
        try:
            return self._session.sql(self._translated(text)).toArrow()
        except self._errors.AnalysisException as error:
            raise ValueError(f"Spark cannot run this: {error}") from None
        except self._errors.PySparkException as error:
            if "PARQUET" not in str(error).upper():
                raise
            raise DamagedRecordingError(
                f"{error}. Export the run again, or take its files out of the dataset."
            ) from None

    def close(self) -> None:
        if self._is_ours:
            self._all.stop()

    def _translated(self, text: str) -> str:
        try:
            [translated] = self._sqlglot.transpile(text, read="duckdb", write="spark")
        except (self._sqlglot.errors.SqlglotError, ValueError) as error:
            raise ValueError(
                f"this cannot be translated to Spark's SQL, it has to be one query: {error}"
            ) from None
        return str(translated)


_LOCAL_SPARK = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "8",
    "spark.log.level": "ERROR",
}

_DUCKDB_TYPES = {
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
}
_OF_SPARK = {"INTEGER": "INT", "VARCHAR": "STRING", "BLOB": "BINARY"}


def _duckdb_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"{_duckdb_type(kind.value_type)}[]"
    return _DUCKDB_TYPES[kind.value_type if pa.types.is_dictionary(kind) else kind]


def _spark_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"ARRAY<{_spark_type(kind.value_type)}>"
    name = _duckdb_type(kind)
    return _OF_SPARK.get(name, name)


def _escaped(path: str) -> str:
    """Returns a path in which no character is one of a glob."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in path)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
