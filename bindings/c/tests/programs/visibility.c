/*
 * What COMPLETED and FAILED mean over TCP: a WRITE that is COMPLETED is seen by who looks afterwards, and after a
 * request has ended, for good or bad, nothing of it touches memory on either side.
 */
#define _GNU_SOURCE
#include "check.h"
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define LENGTH ((size_t)8 << 20)

static transfer_engine_t target, initiator;
static segment_id_t segment;
static unsigned char *remote, *local;

static unsigned char *map(size_t length)
{
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void start(void)
{
    target = new_engine("tcp");
    initiator = new_engine("tcp");
    remote = map(LENGTH);
    local = map(LENGTH);
    CHECK(registerLocalMemory(target, remote, LENGTH, "*", 1) == 0);
    CHECK(registerLocalMemory(initiator, local, LENGTH, "*", 1) == 0);
    segment = open_other(initiator, target);
}

static void stop(void)
{
    destroyTransferEngine(initiator);
    destroyTransferEngine(target);
    CHECK(munmap(remote, LENGTH) == 0 && munmap(local, LENGTH) == 0);
}

/* Of different lengths, again and again, and looked at by the target itself and by a READ. */
static void completed(void)
{
    static const size_t lengths[] = {1, 7, 4096, 65536, 100000, LENGTH / 2};
    start();
    for (int round = 0; round < 30; round++) {
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            size_t length = lengths[i];
            memset(local, round + (int)i + 1, length);
            CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote, length) == STATUS_COMPLETED);
            CHECK(memcmp(local, remote, length) == 0);
            unsigned char *back = local + LENGTH / 2;
            memset(back, 0, length);
            CHECK(transfer(initiator, OPCODE_READ, back, segment, remote, length) == STATUS_COMPLETED);
            CHECK(memcmp(back, remote, length) == 0);
        }
    }
    stop();
}

/* The target takes its memory back, which the initiator does not know: it is the peer who refuses. */
static void rejected(void)
{
    start();
    CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote, 8) == STATUS_COMPLETED);
    memset(remote, 0, LENGTH);
    memset(local, 1, LENGTH);
    CHECK(unregisterLocalMemory(target, remote) == 0);
    for (size_t length = 1; length <= LENGTH; length *= 8) {
        CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote, length) == STATUS_FAILED);
        CHECK(*millstream_last_error());
        CHECK(transfer(initiator, OPCODE_READ, local, segment, remote, length) == STATUS_FAILED);
    }
    /* Nothing was written here or there, and the next one that is good is done. */
    for (size_t i = 0; i < LENGTH; i++)
        CHECK(remote[i] == 0 && local[i] == 1);
    CHECK(registerLocalMemory(target, remote, LENGTH, "*", 1) == 0);
    CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote, LENGTH) == STATUS_COMPLETED);
    CHECK(memcmp(local, remote, LENGTH) == 0);
    stop();
}

/* Once a large WRITE that was refused has FAILED, its source is not read any more: it may go. */
static void rejected_source(void)
{
    start();
    unsigned char *source = map(LENGTH);
    CHECK(registerLocalMemory(initiator, source, LENGTH, "*", 0) == 0);
    CHECK(transfer(initiator, OPCODE_WRITE, source, segment, remote, 8) == STATUS_COMPLETED);
    CHECK(unregisterLocalMemory(target, remote) == 0);
    CHECK(transfer(initiator, OPCODE_WRITE, source, segment, remote, LENGTH) == STATUS_FAILED);
    CHECK(unregisterLocalMemory(initiator, source) == 0);
    CHECK(munmap(source, LENGTH) == 0);
    stop();
}

/* An initiator of the framing of before, which acknowledges no WRITE, with a target of today. */
static void version_one(void)
{
    target = new_engine("tcp");
    CHECK(setenv("MC_TCP_PROTO", "1", 1) == 0);
    initiator = new_engine("tcp");
    CHECK(unsetenv("MC_TCP_PROTO") == 0);
    remote = map(LENGTH);
    local = map(LENGTH);
    CHECK(registerLocalMemory(target, remote, LENGTH, "*", 1) == 0);
    CHECK(registerLocalMemory(initiator, local, LENGTH, "*", 1) == 0);
    segment = open_other(initiator, target);
    memset(local, 9, LENGTH);
    CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote, LENGTH) == STATUS_COMPLETED);
    /* It has been sent, and arrives: the memory is read until it has. */
    volatile unsigned char *last = remote + LENGTH - 1;
    unsigned char seen = 0;
    for (long i = 0; seen != 9 && i < 1000000; i++) {
        CHECK(transfer(initiator, OPCODE_READ, local, segment, (void *)last, 1) == STATUS_COMPLETED);
        seen = local[0];
    }
    CHECK(seen == 9);
    CHECK(transfer(initiator, OPCODE_READ, local, segment, remote, LENGTH) == STATUS_COMPLETED);
    for (size_t i = 0; i < LENGTH; i++)
        CHECK(local[i] == 9);
    stop();
}

/* More than all connections hold at a time waits, and does not fail; there are no more connections than allowed. */
static void waiting(void)
{
    enum { COUNT = 4096, LANES = 2 };
    CHECK(setenv("MC_TCP_LANES_PER_PEER", "2", 1) == 0);
    initiator = new_engine("tcp");
    CHECK(unsetenv("MC_TCP_LANES_PER_PEER") == 0);
    target = createTransferEngine("P2PHANDSHAKE", "127.83.17.5", "", 0, 0);
    CHECK(target && installTransport(target, "tcp", NULL));
    remote = map(LENGTH);
    local = map(LENGTH);
    CHECK(registerLocalMemory(target, remote, LENGTH, "*", 1) == 0);
    CHECK(registerLocalMemory(initiator, local, LENGTH, "*", 1) == 0);
    segment = open_other(initiator, target);
    for (size_t i = 0; i < LENGTH; i++)
        local[i] = (unsigned char)(i * 7);
    static struct transfer_request requests[COUNT];
    size_t length = LENGTH / COUNT;
    for (size_t i = 0; i < COUNT; i++) {
        uint64_t at = (uint64_t)(uintptr_t)(remote + i * length);
        requests[i] = (struct transfer_request){OPCODE_WRITE, local + i * length, segment, at, length};
    }
    batch_id_t batch = allocateBatchID(initiator, COUNT);
    CHECK(submitTransfer(initiator, batch, requests, COUNT) == 0);
    CHECK(millstream_wait_batch(initiator, batch, LONG_MS) == 0);
    /* Connections that are kept, by the table of the kernel: to that address, with a port of data. */
    int connections = 0;
    unsigned address, port, state;
    char line[512];
    FILE *table = fopen("/proc/net/tcp", "r");
    CHECK(table);
    while (fgets(line, sizeof line, table)) {
        if (sscanf(line, " %*d: %*x:%*x %x:%x %x", &address, &port, &state) == 3 &&
            address == htonl(127u << 24 | 83 << 16 | 17 << 8 | 5) && state == 1)
            connections++;
    }
    fclose(table);
    CHECK(connections >= 1 && connections <= LANES);
    for (size_t i = 0; i < COUNT; i++)
        CHECK(ended(initiator, batch, i) == STATUS_COMPLETED);
    CHECK(freeBatchID(initiator, batch) == 0);
    CHECK(memcmp(local, remote, LENGTH) == 0);
    stop();
}

/*
 * An engine is destroyed amid its transfers: afterwards nothing of it is read. What was sent before may still arrive, as
 * no task says that it has ended, so the last check is of other bytes.
 */
static void shutdown_amid(void)
{
    enum { COUNT = 64 };
    start();
    for (int round = 0; round < 20; round++) {
        transfer_engine_t brief = new_engine("tcp");
        unsigned char *source = map(LENGTH);
        memset(source, round + 1, LENGTH);
        CHECK(registerLocalMemory(brief, source, LENGTH, "*", 0) == 0);
        segment_id_t there = open_other(brief, target);
        struct transfer_request requests[COUNT];
        for (size_t i = 0; i < COUNT; i++)
            requests[i] = (struct transfer_request){OPCODE_WRITE, source, there, (uint64_t)(uintptr_t)remote, LENGTH / 2};
        batch_id_t batch = allocateBatchID(brief, COUNT);
        CHECK(submitTransfer(brief, batch, requests, COUNT) == 0);
        struct transfer_status status;
        CHECK(getTransferStatus(brief, batch, (size_t)round % COUNT, &status) == 0);
        destroyTransferEngine(brief);
        CHECK(munmap(source, LENGTH) == 0);
        CHECK(getTransferStatus(brief, batch, 0, &status) == 1);
    }
    /* The target goes on. */
    size_t half = LENGTH / 2;
    memset(local, 200, half);
    CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote + half, half) == STATUS_COMPLETED);
    CHECK(memcmp(local, remote + half, half) == 0);
    stop();
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"completed", completed},     {"rejected", rejected}, {"rejected_source", rejected_source},
        {"version_one", version_one}, {"waiting", waiting},   {"shutdown_amid", shutdown_amid},
    };
    for (size_t i = 0; argc == 2 && i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(cases[i].name, argv[1]) == 0) {
            cases[i].run();
            return 0;
        }
    }
    fprintf(stderr, "no such case\n");
    return 2;
}
