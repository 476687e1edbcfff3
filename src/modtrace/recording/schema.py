"""Defines the tables of a recording in one commented text, from which the Arrow schemas are made.

Every table is an Arrow IPC stream of its own. Ids are per rank. A column that a later version may fill is
there from the start, because one stream has one schema; anything open-ended is a row (`scalars`).
"""

from functools import cache

import pyarrow as pa

#: Increased whenever a reader of the older version could misread new files. Files of older versions stay readable.
SCHEMA_VERSION = 2

# One line a column: name, type, meaning. A `?` after the type means null where unknown or not applicable. Types are
# Arrow's; `dictionary` is a dictionary-encoded string, for strings that repeat. Times are those of
# `time.perf_counter_ns`, even for devices; meta.json relates them to wall time.
TABLES_TEXT = """
table modules                     one row a module; the last row of a module_id wins (names are learnt late)
    module_id       int32         counts up in the order the modules were first seen
    root_id         int32         the root it belongs to; its own module_id for a root
    path            string        as in state_dict, wrapper parts stripped; "" for a root,
                                  `parent.(Linear#0)` if it is registered nowhere
    raw_path        string        the same with wrapper parts (`_orig_mod`, DDP's `module`, ...)
    aliases         list<string>  the other paths of a module registered more than once
    name            string?       of a root: what it is shown as (`GPT`, `GPT#1`, or chosen by the user)
    type            string        class name
    parent_id       int32?        the module it is registered in, wrappers included; null for a root
    parameters      int64?        elements of its own and its descendants' parameters, each counted once
    buffers         int64?        the same for buffers

table sites                       a place where a tensor is seen
    site_id         int32
    module_id       int32?        null for a parameter that no module owns, and for a loss
    nth             int32?        call of the module within the step, from 0; null for parameters and losses
    role            dictionary    input, output, grad_output, grad_input, parameter, parameter_grad, buffer,
                                  optimizer_state, update, op_output, leaf, loss
    slot            string        pytree key path: `[0].hidden_states`; of a parameter its name in the module;
                                  of a loss `[1]` if its backward began with several tensors
    op              dictionary?   of op_output: the op's name
    op_nth          int32?        of that name within the call, from 0

table calls                       one execution of one module in one phase
    call_id         int64         unique in the rank
    step            int32
    module_id       int32?        null for an optimizer step
    nth             int32?        call of the module within the step, counted over forward calls, from 0;
                                  a backward or recompute has that of the forward it belongs to, null if unknown
    parent_call_id  int64?        the call around it, of its own phase
    phase           phase         forward, backward, recompute, optimizer
    forward_call_id int64?        of a backward: the call whose nodes ran (it may lie in an earlier step)
    recompute_of    int64?        of a recompute: the forward call it repeats
    triggered_by    int64?        of a recompute: the call whose backward asked for it
    thread          int32         counts up in the order the threads were first seen
    start_ns        int64
    end_ns          int64?        null if the end was not seen
    overhead_ns     int64?        of end_ns - start_ns: what modtrace spent measuring values
    device_start_ns int64?        on request: when a device began what the call has issued; null where it works on none
    device_end_ns   int64?        ... and when it had done it, and what the calls inside it have issued
    raised          bool          it ended by an exception (the early stop of a recompute is none)
    compiled        bool          it ran as a compiled region: what is inside is not seen
    flops           int64?        with ops, as the next three: of the call and of those inside it; null if an
                                  op's are unknown
    allocated_bytes int64?        storages that its ops have made, and what others gained that were resized in it
    peak_bytes      int64?        most that lived of such memory at once, when an op had ended, above what lived before
                                  its first op; null if it ran no op
    saved_bytes     int64?        kept for its backward; null if it is unknown of an op, or no backward came
    compilation_id  int32?        later: row of `compilations` from which the region comes that it ran as
    micro_batch     int32?        of a stage of torch.distributed.pipelining: which micro-batch it works on, from 0
    stage           int32?        ... and which stage it belongs to, from 0, counted over all ranks
    training        bool?         of an outermost forward call, and of one whose module computes something else in
                                  training (dropout, batch norm): `training` of the module as the call began

table ops                         one operator as the dispatcher saw it
    op_id           int64
    step            int32
    call_id         int64?        row of `calls`: in backward that of the call's backward; null outside of calls
    phase           phase?        null outside of modules, backward and optimizers
    name            dictionary    aten.addmm.default
    nth             int32         of its name within the call, from 0
    args            dictionary    JSON template, `$slot` for tensors
    sequence_nr     int64?        autograd node that it has made, or, in backward, that it works for
    sequence_thread int32?        whose thread counts that number
    forward_op_id   int64?        in backward: the op that made the node
    thread          int32
    is_view         bool          it returned views, and copied nothing
    start_ns        int64
    end_ns          int64?
    flops           int64?        a multiply-add is 2; null if unknown. Not always what torch.utils.flop_counter
                                  says: see FLOPs in limits.md
    bytes_read      int64?        of the tensors it was given; a view reads and writes nothing
    bytes_written   int64?        of the tensors it returned
    saved_bytes     int64?        kept for its backward alone, each storage once; null if unknown. The first op
                                  in an autograd Function's forward has what the Function keeps
    raised          bool
    accumulation    bool?         an addition made by the engine where gradients meet
    source          dictionary?   file:line of the user's code, on request; null in backward: see forward_op_id
    python_name     dictionary?   `linear` over `addmm`, on request
    compilation_id  int32?        later: row of `compilations` from which the region comes that it ran in
    kernel          dictionary?   later: what ran on the device, of several kernels the longest
    stream          int32?        later: of the device, on which it was queued
    device_start_ns int64?        on request: when the first of its kernels could begin
    device_end_ns   int64?        ... and when the last of them had ended

table tensors                     one tensor as an op or a call produced or first read it
    tensor_id       int64
    site_id         int32?        of what is read and no op has made: parameter, buffer, input, constant; of a
                                  parameter or buffer also where ops have made or written it
    shape           list<int64>
    stride          list<int64>
    offset          int64
    conj            bool
    neg             bool
    dtype           dictionary?
    device          dictionary?
    layout          dictionary?
    requires_grad   bool          as the first op that reads it, or the call that returns it, finds it
    storage         int64?        tensors that share memory share it; null if it has none (sparse)
    version         int64?        how often the storage had been written to
    producer_op     int64?        that returned it, or else wrote to its storage last; null if none was seen
    producer_call   int64?        later
    slot            string        of the op's output; "" if it returns one tensor
    note            dictionary?   why its storage is not known: it has none, or a subclass of yours raised when asked;
                                  null columns and an empty shape are then not known either

table alive                       a storage that lived when an op could not have memory; only with ops, once a step
    step            int32
    op_id           int64?        the op that could not have it, the last one in the step
    error           dictionary    what torch said
    storage         int64?        as in `tensors`; null of what no op has met: a parameter, or without a role all
                                  others of a device together (caches, what is older than the recording, and what is
                                  not among the 100,000 largest)
    bytes           int64
    device          dictionary
    role            dictionary?   parameter, buffer, parameter_grad, optimizer_state, as the models and optimizers had
                                  them at that moment; null for any other
    module_id       int32?        of these the module that has it, of a gradient or a state that of its parameter
    slot            dictionary?   ... and its name there

table collectives                 one collective, or one message between two ranks, on this rank's side
    step            int32         of what is in no step: the step before it
    op_id           int64?        later: the op that issued it
    call_id         int64?        the call that issued it, in backward the forward call; null outside of calls, and
                                  where it is not known
    path            dictionary?   the path of that call's module, also where the row of the call is missing; of one of
                                  DDP's buckets, those of the first and the last layer whose gradients it has:
                                  `blocks.2.up to blocks.1.down`
    phase           phase?
    name            dictionary    all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, ...;
                                  `last`: no collective, but the number of the group's last one when the recording
                                  ended, or the process was last seen to live, at end_ns; no other began since start_ns
    group           dictionary    name of the process group, the same on all ranks
    ranks           dictionary?   global ranks of the group: `0-3,8`
    seq_id          int64?        number of the collective within its group, or of the message between its two ranks in
                                  one direction: rows of several ranks with the same group and number are one
                                  collective
    peer            int32?        global rank: of send and recv the other one, of broadcast, reduce, scatter and gather
                                  the root
    reduce_op       dictionary?   sum, avg, max, ...
    dtype           dictionary?
    bytes_read      int64?        of the tensors it was given
    bytes_written   int64?        of the tensors it filled
    thread          int32?        null: C++ code started it (DDP's buckets, DTensors, compiled code). Of these there are
                                  the newest 2,000 when the recording ends, and at times before
    start_ns        int64         when it was issued
    end_ns          int64?        when it was seen to be complete: its results may be read from then on
    wait_ns         int64?        of this time, how long the program waited for it; null: it was not seen to wait
    device_start_ns int64?        later
    device_end_ns   int64?        later

table compilations                one compilation of torch.compile: of a function into a region, the first or a further
                                  one, or of a region's backward
    compilation_id  int32         counts up in the order in which the rows are written
    step            int32         the step in which it ran, also where that is not recorded
    call_id         int64?        the call that it held up; null of a backward, and where the step is not recorded
    module_id       int32?        whose call it was; null where none ran, or calls of several threads did
    phase           phase?        forward, backward
    compile_id      dictionary    as torch prints it: `2/1` is the second compilation of the third function; behind a
                                  reset of Dynamo `1:2/1`
    function        dictionary?   name, file and line: `forward train.py:31`; what comes behind a graph break is
                                  `torch_dynamo_resume_in_forward_at_34`
    backend         dictionary?   later
    ops             int32?        in its graph; null of a backward, and where there is no graph
    guards          int32?
    failed_guards   list<string>? why those compiled before could not be used, one each: `2/0: self.n == 1`
    graph_breaks    list<string>? why its graph ends before the function does, with the stack of the user's code; null:
                                  not known
    error           string?       why it was not compiled: it runs as if it never had been
    start_ns        int64
    end_ns          int64?

table compiled_ops                an op inside of compiled code, one row each time that it is compiled; only with ops
    compilation_id  int32         row of `compilations` of the region's forward, also of what its backward runs
    phase           phase         forward, backward
    nth             int32         its place in the graph of that phase, from 0
    module_id       int32?        whose forward it is a part of, or, in backward, the gradient of; null: not known
    calls           list<int32>?  which call in the graph of that module, last, and of those around it; from 0
    name            dictionary    aten.addmm.default; inductor takes many ops apart
    inputs          list<int32>   the places of the ops that made what it reads
    given           list<int32>?  the places, among what the graph is given, of what it reads of that
    saved           list<int32>?  in backward: the places of the forward's ops whose results it reads
    returned        list<int32>?  the places, among what the graph returns to the program, of what it makes
    is_view         bool          it returns a view, and copies nothing
    shape           list<int64>?  of the first tensor that it returns; -1 for a size that varies; null if there is none
    dtype           dictionary?
    source          dictionary?   file:line of the user's code, in backward of the forward op's
    kernels         list<string>  into which inductor has fused it: `cpp_fused_gelu_2`, and `cpp_fused_gelu_2@1` where
                                  the same code runs a second time; several if each computes the op anew; none: it
                                  runs by itself, or is a view, or the backend is not inductor for a CPU

table compiled_runs               one run of a compiled graph; only with ops, of code compiled while they were recorded
    op_id           int64         a number that no op has: it began after the op with the number before
    step            int32
    call_id         int64?        row of `calls`: in backward that of the call's backward; null outside of calls
    phase           phase?
    compile_id      dictionary    as in `compilations`, also in backward that of the forward
    thread          int32
    start_ns        int64
    end_ns          int64?        null if it raised
    given           list<int64>   tensor_ids of what it is given, in the order of the graph; -1 for what none of its ops
                                  reads, what its forward has kept for it, and what is no tensor
    returned        list<int64>   tensor_ids of what it returns; -1 for what none of its ops has made, what it keeps for
                                  its backward, and what is no tensor

table uses                        who read which tensor
    consumer_op     int64?
    consumer_call   int64?        an outermost forward call that is given it or returns it; its consumer_op is null,
                                  its slot `input` or `output` with the key path: `input['ids']`, `output.logits`.
                                  Of what it is given only what an op has made, or read before: of any other the
                                  site says that it is an input
    slot            string        argument: `mat1`, `tensors[0]`
    tensor_id       int64

table values                      the statistics of one tensor at one site, step and phase: a stat row
    step            int32
    phase           phase?
    site_id         int32
    call_id         int64?        the call that returned it; of a gradient the forward call; null for parameters
                                  and losses
    op_id           int64?        of what an op returned, or of a leaf the op that read it first
    order           int64         of the measurement within the step; sites that share one tensor share it
    shape           list<int64>
    dtype           dictionary
    numel           int64
    count           int64?        numbers measured (two a complex element); null: not measured, see note
    min             float64?      NaN if a NaN was among them; null if count is 0
    max             float64?
    sum             float64?
    sumsq           float64?      sum of squares
    nan_count       int64         0 unless min or max shows one
    inf_count       int64
    first_index     int64?        row-major index of the first element that is NaN or infinite; null if none is, or it
                                  is not known
    sumabs          float64?      sum of magnitudes; infinite or NaN where one is
    zero_count      int64?        zeros of either sign
    sum4            float64?      sum of fourth powers
    argmax          int64?        row-major index of the element of the largest magnitude, of the first one; of the
                                  first NaN if there is one; null if numel is 0
    channel_max     list<float>?  largest magnitude at each index of one dimension, the last unless chosen; NaN where
                                  a NaN is
    sample          list<float>?  elements at places that numel and their number tell; two numbers a complex one
    hash            binary?       fingerprints of the values
    sketch          list<float>?
    histogram       list<int64>?  256 counts of finite numbers by magnitude: k of those from 2^(k-127) up to 2^(k-126);
                                  0 of all below 2^-126 but zeros, 255 of all from 2^128 on. With zeros, NaN and
                                  infinite ones they are `count`
    user            string?       JSON of the user's own function
    blob            string?       the whole tensor: `FILE:NAME`, the file in the rank's folder
    note            dictionary?   why it was not measured, or which part of it was
    placements      dictionary?   of a DTensor, of which the row has the part on this rank: one for each dimension of
                                  its mesh, as torch prints them: `S(0)R`. The part of a partial sum, `P(sum)`, is no
                                  number of the model until it is reduced
    mesh            dictionary?   the names and sizes of the dimensions of its mesh, and its ranks: `dp=2,tp=4 on 0-7`
    global_shape    list<int64>?  of the DTensor of which `shape` is the part
    global_offset   list<int64>?  where the part begins in it
    micro_batch     int32?        later: of a pipeline, as in `calls`
    stage           int32?        later: of a pipeline, as in `calls`
    requires_grad   bool?         of what a module is given or returns: whether a gradient can be asked of it

table parameters                  a parameter of a model that trains; again when a later step finds something of it
                                  changed
    step            int32
    site_id         int32         its row of `sites`; of a parameter with several owners that of the first
    shape           list<int64>
    dtype           dictionary
    requires_grad   bool
    optimizer       dictionary?   class of the optimizer that updates it: `AdamW`, of a second one `AdamW#1`; null:
                                  none that has stepped
    param_group     int32?        its group there
    has_gradient    bool?         of one in no optimizer: whether it had a gradient when an optimizer stepped

table intervals                   a stretch of the loop that is no call of a module
    step            int32         of what is in no step: the step before it
    kind            dictionary    backward: one run of the autograd engine; data: the program waits for a DataLoader;
                                  writing: modtrace writes rows on the program's thread, or measures behind a step
    name            dictionary?   of data: the class of the dataset, and how many workers there are: `Texts, 4 workers`
    thread          int32
    start_ns        int64
    end_ns          int64
    overhead_ns     int64?        of end_ns - start_ns: what modtrace spent measuring values

table scalars                     what the user logged
    step            int32
    name            dictionary
    value           float64

table steps                       one row a step, when it has ended
    step            int32
    kind            dictionary    train, eval
    start_ns        int64
    end_ns          int64
    overhead_ns     int64?        of end_ns - start_ns: what modtrace spent measuring values
    uncleared       bool?         an optimizer used gradients to which backwards had added since its last step, without
                                  any write to them between: null if none stepped before
    next_start_ns   int64?        when the next step began, recorded or not; null: it had not when the row was made
    resident_bytes  int64?        of the process, when the next step began, or `rec.step()` or the recording ended this
                                  one; null: not known, as of a step whose graph outlived it
    device_bytes    int64?        ... that tensors took on accelerators, as `memory_allocated` of their modules says;
                                  null too where reading it at each step would take more than 0.2 % of the time
"""

_ARROW_TYPES = {
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "phase": pa.dictionary(pa.int8(), pa.string()),
    "list<string>": pa.list_(pa.string()),
    "list<int32>": pa.list_(pa.int32()),
    "list<int64>": pa.list_(pa.int64()),
    "list<float>": pa.list_(pa.float32()),
}


@cache
def schemas() -> dict[str, pa.Schema]:
    """Returns the Arrow schema of every table, in the order of the text."""
    fields: dict[str, list[pa.Field]] = {}
    table = ""
    for line in TABLES_TEXT.splitlines():
        parts = line.split()
        if line.startswith("table "):
            table = parts[1]
            fields[table] = []
        elif len(parts) >= 2 and parts[1].rstrip("?") in _ARROW_TYPES and not line.startswith(" " * 8):
            name, type_name = parts[0], parts[1]
            fields[table].append(
                pa.field(name, _ARROW_TYPES[type_name.rstrip("?")], nullable=type_name.endswith("?"))
            )
    return {table: pa.schema(columns) for table, columns in fields.items()}


def schema(table: str) -> pa.Schema:
    """Returns the Arrow schema of one table.

    Raises:
        ValueError: there is no such table; the text lists those there are.
    """
    try:
        return schemas()[table]
    except KeyError:
        raise ValueError(f"no table {table!r} in a recording; there are: {', '.join(schemas())}") from None
