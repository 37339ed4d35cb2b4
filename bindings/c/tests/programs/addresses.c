/*
 * Which ranges of a peer's memory a request may have: wholly in one registered buffer. Others end as FAILED, as
 * their READs do, and no byte of theirs moves.
 */
#include "check.h"
#include <stdint.h>

static char target_memory[16384], local[16384];
static transfer_engine_t target, initiator;
static segment_id_t segment;

/* How a WRITE and a READ of this range end: both the same. */
static int both(const char *at, uint64_t length)
{
    int written = transfer(initiator, OPCODE_WRITE, local, segment, at, length);
    int read = transfer(initiator, OPCODE_READ, local, segment, at, length);
    CHECK(written == read);
    return written;
}

static void expect(const char *what, int is_in, const char *at, uint64_t length)
{
    char before[sizeof target_memory];
    memcpy(before, target_memory, sizeof before);
    memset(local, 0x55, sizeof local);
    int status = both(at, length);
    printf("%s: %d\n", what, status);
    CHECK(status == (is_in ? STATUS_COMPLETED : STATUS_FAILED));
    /* Nothing but the range is touched, and that only if it is good. */
    for (size_t i = 0; i < sizeof before; i++) {
        const char *byte = target_memory + i;
        int is_written = is_in && byte >= at && byte < at + length;
        CHECK(*byte == (is_written ? 0x55 : before[i]));
    }
    memcpy(target_memory, before, sizeof before);
}

int main(int argc, char **argv)
{
    const char *protocol = argc > 1 ? argv[1] : "tcp";
    target = new_engine(protocol);
    initiator = new_engine(protocol);
    CHECK(registerLocalMemory(initiator, local, sizeof local, "*", 0) == 0);
    segment = open_other(initiator, target);

    expect("no buffer at all", 0, target_memory, 1);
    char *buffer = target_memory + 4096;
    CHECK(registerLocalMemory(target, buffer, 4096, "*", 1) == 0);
    expect("exactly the buffer", 1, buffer, 4096);
    expect("within the buffer", 1, buffer + 100, 200);
    expect("up to its end", 1, buffer + 4000, 96);
    expect("before it", 0, buffer - 100, 50);
    expect("behind it", 0, buffer + 4096, 50);
    expect("partly before it", 0, buffer - 1, 2);
    expect("partly behind it", 0, buffer + 4095, 2);
    expect("all of it and more", 0, buffer - 1, 4098);
    expect("beyond the end of the address space", 0, (char *)(uintptr_t)(UINTPTR_MAX - 10), 11);
    expect("its first byte", 1, buffer, 1);
    expect("its last byte", 1, buffer + 4095, 1);
    CHECK(registerLocalMemory(target, buffer + 4096, 4096, "*", 1) == 0);
    expect("another buffer beside it", 1, buffer + 4096, 4096);
    expect("across the border of two buffers", 0, buffer + 4090, 12);
    CHECK(registerLocalMemory(target, buffer - 4096, 4096, "*", 0) == 0);
    expect("a buffer that is not for peers", 0, buffer - 4096, 1);

    /* Of no bytes: done, wherever it is, and nothing moves. */
    CHECK(both(buffer, 0) == STATUS_COMPLETED);
    CHECK(both(NULL, 0) == STATUS_COMPLETED);

    /* A length whose end would be before its beginning. */
    struct transfer_request request = {OPCODE_WRITE, local, segment, (uint64_t)(uintptr_t)buffer, UINT64_MAX};
    batch_id_t batch = allocateBatchID(initiator, 1);
    int code = submitTransfer(initiator, batch, &request, 1);
    CHECK(code != 0 || ended(initiator, batch, 0) == STATUS_FAILED);
    CHECK(freeBatchID(initiator, batch) == 0);

    /* A large one. */
    size_t large = 64 << 20;
    char *remote = malloc(large), *own = malloc(large);
    CHECK(remote && own);
    memset(own, 0x33, large);
    CHECK(registerLocalMemory(target, remote, large, "*", 1) == 0);
    CHECK(registerLocalMemory(initiator, own, large, "*", 0) == 0);
    CHECK(transfer(initiator, OPCODE_WRITE, own, segment, remote, large) == STATUS_COMPLETED);
    CHECK(memcmp(own, remote, large) == 0);
    CHECK(transfer(initiator, OPCODE_WRITE, own, segment, remote + 1, large) == STATUS_FAILED);

    destroyTransferEngine(initiator);
    destroyTransferEngine(target);
    free(remote);
    free(own);
    return 0;
}
