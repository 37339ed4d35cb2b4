/* WRITEs to a file that are to survive a loss of power: the argument is the segment's name. */
#include "check.h"

static char local[4096];

int main(int count, char **arguments)
{
    CHECK(count == 2);
    transfer_engine_t engine = new_engine("nvmeof");
    CHECK(registerLocalMemory(engine, local, sizeof local, "*", 1) == 0);
    segment_id_t segment = openSegment(engine, arguments[1]);
    CHECK(segment > 0);
    memset(local, 7, sizeof local);
    struct transfer_request to_file = {OPCODE_WRITE, local, segment, 0, sizeof local};
    struct transfer_request to_memory = {OPCODE_WRITE, local, LOCAL_SEGMENT, (uint64_t)(uintptr_t)local, 1};
    struct millstream_submit_options options = {.size = sizeof options, .durable = 1};
    batch_id_t batch = allocateBatchID(engine, 2);
    CHECK(batch != INVALID_BATCH);
    /* All, or none. */
    struct transfer_request both[] = {to_file, to_memory};
    CHECK(millstream_submit(engine, batch, both, 2, &options) == MILLSTREAM_NOT_DURABLE);
    CHECK(strstr(millstream_last_error(), "request 1: it is to be durable"));
    CHECK(millstream_submit(engine, batch, &to_file, 1, &options) == 0);
    CHECK(ended(engine, batch, 0) == STATUS_COMPLETED);
    options.durable = 0;
    CHECK(millstream_submit(engine, batch, &to_memory, 1, &options) == 0);
    CHECK(ended(engine, batch, 1) == STATUS_COMPLETED);
    CHECK(freeBatchID(engine, batch) == 0);
    destroyTransferEngine(engine);
    return 0;
}
