/*
 * An engine whose settings are arguments, behind the segment's name and the address of its memory: writes there, reads
 * it back, and prints "done", or why it could not.
 */
#include "check.h"

static char local[8192];

int main(int count, char **arguments)
{
    CHECK(count >= 3);
    const char *const *settings = (const char *const *)(arguments + 3);
    transfer_engine_t engine =
        millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, settings, (size_t)count - 3);
    if (!engine || !installTransport(engine, "tcp", NULL)) {
        puts(millstream_last_error());
        return 0;
    }
    CHECK(registerLocalMemory(engine, local, sizeof local, "*", 1) == 0);
    segment_id_t segment = openSegment(engine, arguments[1]);
    if (segment < 0) {
        puts(millstream_last_error());
        return 0;
    }
    void *at = (void *)(uintptr_t)strtoull(arguments[2], NULL, 10);
    memset(local, 9, 4096);
    CHECK(transfer(engine, OPCODE_WRITE, local, segment, at, 4096) == STATUS_COMPLETED);
    CHECK(transfer(engine, OPCODE_READ, local + 4096, segment, at, 4096) == STATUS_COMPLETED);
    CHECK(memcmp(local, local + 4096, 4096) == 0);
    destroyTransferEngine(engine);
    puts("done");
    return 0;
}
