/*
 * What programs rely on that were written for the original: requests of no bytes, local memory that is not registered,
 * requests that a peer refuses beside others, segments that threads open and close, and the codes of each.
 */
#include "check.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#define LENGTH 65536

static char remote[LENGTH], local[LENGTH], unregistered[LENGTH];

/* Memory is there before the transport. */
static void installed_late(const char *protocol)
{
    static char memory[4096], source[4096];
    transfer_engine_t target = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
    CHECK(registerLocalMemory(target, memory, sizeof memory, "*", 1) == 0);
    CHECK(installTransport(target, protocol, NULL));
    transfer_engine_t initiator = createTransferEngine("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
    CHECK(registerLocalMemory(initiator, source, sizeof source, "*", 1) == 0);
    CHECK(installTransport(initiator, protocol, NULL));
    memset(memory, 0, sizeof memory);
    memset(source, 5, sizeof source);
    segment_id_t segment = open_other(initiator, target);
    CHECK(transfer(initiator, OPCODE_WRITE, source, segment, memory, sizeof memory) == STATUS_COMPLETED);
    CHECK(memory[0] == 5 && memory[sizeof memory - 1] == 5);
    destroyTransferEngine(initiator);
    destroyTransferEngine(target);
}

static void mixed(transfer_engine_t initiator, segment_id_t segment)
{
    uint64_t at = (uint64_t)(uintptr_t)remote;
    struct transfer_request requests[8] = {
        {OPCODE_WRITE, local, segment, at, 100},
        {OPCODE_WRITE, local, segment, at, 0},
        {OPCODE_WRITE, local, segment, at - 10, 10},
        {OPCODE_WRITE, unregistered, segment, at + 200, 100},
        {OPCODE_WRITE, unregistered + 50, segment, at + 300, 50},
        {OPCODE_READ, unregistered + 1000, segment, at, 100},
        {OPCODE_READ, NULL, segment, at, 10},
        {OPCODE_WRITE, local + 400, segment, at + 400, 100},
    };
    static const int expected[8] = {
        STATUS_COMPLETED, STATUS_COMPLETED, STATUS_FAILED, STATUS_COMPLETED,
        STATUS_COMPLETED, STATUS_COMPLETED, STATUS_FAILED, STATUS_COMPLETED,
    };
    memset(remote, 0, sizeof remote);
    for (int i = 0; i < LENGTH; i++) {
        local[i] = (char)(i + 1);
        unregistered[i] = (char)(i * 3);
    }
    memset(remote, 77, 100);
    memcpy(local, remote, 100);
    batch_id_t batch = allocateBatchID(initiator, 17);
    CHECK(submitTransfer(initiator, batch, requests + 7, 1) == 0);
    CHECK(submitTransfer(initiator, batch, requests, 8) == 0);
    CHECK(submitTransfer(initiator, batch, requests, 8) == 0);
    CHECK(submitTransfer(initiator, batch, requests, 1) == 2);
    for (size_t i = 0; i < 8; i++) {
        CHECK(ended(initiator, batch, 1 + i) == expected[i]);
        CHECK(ended(initiator, batch, 9 + i) == expected[i]);
    }
    CHECK(ended(initiator, batch, 0) == STATUS_COMPLETED);
    CHECK(ended(initiator, batch, 3) == STATUS_FAILED);
    CHECK(strstr(millstream_last_error(), "do not lie in a buffer"));
    CHECK(millstream_cancel_task(initiator, batch, 3) == 0);
    CHECK(millstream_wait_batch(initiator, batch, LONG_MS) == 0);
    CHECK(freeBatchID(initiator, batch) == 0);
    CHECK(memcmp(remote + 200, unregistered, 100) == 0);
    CHECK(memcmp(remote + 300, unregistered + 50, 50) == 0);
    CHECK(memcmp(remote + 400, local + 400, 100) == 0);
    CHECK(unregistered[1000] == 77 && unregistered[1099] == 77);
    /* It was borrowed, and is the program's again. */
    CHECK(registerLocalMemory(initiator, unregistered, LENGTH, "*", 1) == 0);
    CHECK(unregisterLocalMemory(initiator, unregistered) == 0);
}

/* What is borrowed for one batch stays for another that needs it, is no registered memory, and may overlap what is. */
static void borrowed_twice(void)
{
    enum { BYTES = 4 << 20, MANY = 16 };
    transfer_engine_t target = new_engine("tcp"), initiator = new_engine("tcp");
    char *memory = calloc(1, BYTES), *source = malloc(BYTES);
    CHECK(memory && source);
    memset(source, 3, BYTES);
    CHECK(registerLocalMemory(target, memory, BYTES, "*", 1) == 0);
    segment_id_t segment = open_other(initiator, target);
    uint64_t at = (uint64_t)(uintptr_t)memory;
    struct transfer_request requests[MANY];
    for (int i = 0; i < MANY; i++)
        requests[i] = (struct transfer_request){OPCODE_WRITE, source, segment, at, BYTES};
    batch_id_t first = allocateBatchID(initiator, 1), second = allocateBatchID(initiator, MANY);
    CHECK(submitTransfer(initiator, first, requests, 1) == 0);
    CHECK(submitTransfer(initiator, second, requests, MANY) == 0);
    batch_id_t strict = allocateBatchID(initiator, 1);
    CHECK(millstream_submit(initiator, strict, requests, 1, NULL) == 3);
    CHECK(freeBatchID(initiator, strict) == 0);
    CHECK(unregisterLocalMemory(initiator, source) == -3);
    CHECK(millstream_wait_batch(initiator, first, LONG_MS) == 0);
    CHECK(freeBatchID(initiator, first) == 0);
    for (int i = 0; i < MANY; i++)
        CHECK(ended(initiator, second, i) == STATUS_COMPLETED);
    CHECK(millstream_wait_batch(initiator, second, LONG_MS) == 0);
    CHECK(freeBatchID(initiator, second) == 0);
    CHECK(memory[0] == 3 && memory[BYTES - 1] == 3);
    /* A head and then the whole, in one batch; and the whole after a batch that nobody has asked after. */
    requests[0].length = 64;
    requests[1].source = source + 32;
    requests[1].length = 64;
    batch_id_t third = allocateBatchID(initiator, 3), fourth = allocateBatchID(initiator, 1);
    CHECK(submitTransfer(initiator, third, requests, 3) == 0);
    for (int i = 0; i < 3; i++)
        CHECK(ended(initiator, third, i) == STATUS_COMPLETED);
    CHECK(freeBatchID(initiator, third) == 0);
    CHECK(submitTransfer(initiator, fourth, requests, 1) == 0);
    while (transfer(initiator, OPCODE_WRITE, source, segment, memory, BYTES) != STATUS_COMPLETED)
        ; /* Until the other one is over. */
    CHECK(freeBatchID(initiator, fourth) == 0);
    destroyTransferEngine(initiator);
    destroyTransferEngine(target);
    free(memory);
    free(source);
}

static void messages(transfer_engine_t target, transfer_engine_t initiator, segment_id_t segment)
{
    int size = 0;
    uint64_t at = (uint64_t)(uintptr_t)remote;
    struct transfer_request requests[2] = {{OPCODE_WRITE, local, segment, at, 100}, {OPCODE_WRITE, local, segment, 1, 100}};
    struct notify_msg message = {"whose", "what"};
    batch_id_t batch = allocateBatchID(initiator, 3);
    /* Not after a failure. */
    CHECK(submitTransferWithNotify(initiator, batch, requests, 2, message) == 0);
    CHECK(ended(initiator, batch, 0) == STATUS_COMPLETED && ended(initiator, batch, 1) == STATUS_FAILED);
    CHECK(submitTransferWithNotify(initiator, batch, requests, 1, message) == 0);
    CHECK(ended(initiator, batch, 2) == STATUS_COMPLETED);
    CHECK(freeBatchID(initiator, batch) == 0);
    notify_msg_t *list;
    do {
        list = getNotifsFromEngine(target, &size);
    } while (!list);
    CHECK(size == 1 && strcmp(list[0].name, "whose") == 0 && strcmp(list[0].msg, "what") == 0);
    CHECK(freeNotifsMsgBuf(list, size) == 0);
    /* Of requests of no bytes all is done. */
    struct transfer_request nothing[2] = {{OPCODE_WRITE, local, segment, at, 0}, {OPCODE_READ, local, segment, at, 0}};
    batch = allocateBatchID(initiator, 2);
    CHECK(submitTransferWithNotify(initiator, batch, nothing, 2, message) == 0);
    CHECK(ended(initiator, batch, 1) == STATUS_COMPLETED);
    CHECK(freeBatchID(initiator, batch) == 0);
    list = getNotifsFromEngine(target, &size);
    CHECK(size == 1 && strcmp(list[0].name, "whose") == 0);
    CHECK(freeNotifsMsgBuf(list, size) == 0);
    struct notify_msg alone = {"alone", "as well"};
    CHECK(genNotifyInEngine(initiator, (uint64_t)segment, alone) == 0);
    list = getNotifsFromEngine(target, &size);
    CHECK(size == 1 && strcmp(list[0].name, "alone") == 0);
    CHECK(freeNotifsMsgBuf(list, size) == 0);
}

static void segments(transfer_engine_t target, transfer_engine_t initiator, segment_id_t segment)
{
    char name[256], slashes[260];
    CHECK(getLocalIpAndPort(target, name, sizeof name) == 0);
    snprintf(slashes, sizeof slashes, "//%s", name);
    CHECK(openSegment(initiator, name) == segment);
    CHECK(openSegment(initiator, slashes) == segment);
    CHECK(openSegmentNoCache(initiator, name) == segment);
    CHECK(syncSegmentCache(initiator) == 0);
    /* What one thread closes, another one still has. */
    for (int i = 0; i < 3; i++)
        CHECK(closeSegment(initiator, segment) == 0);
    CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote, 8) == STATUS_COMPLETED);
    CHECK(closeSegment(initiator, segment) == 0);
    CHECK(closeSegment(initiator, segment) == -1);
    segment_id_t again = openSegment(initiator, name);
    CHECK(again > 0 && again != segment);
    CHECK(transfer(initiator, OPCODE_WRITE, local, again, remote, 8) == STATUS_COMPLETED);
    CHECK(removeLocalSegment(initiator, name) == 0);
    CHECK(removeLocalSegment(initiator, name) == 0);
    CHECK(closeSegment(initiator, again) == -1);
    CHECK(getLocalIpAndPort(initiator, name, sizeof name) == 0);
    CHECK(openSegment(initiator, name) == LOCAL_SEGMENT);
    CHECK(removeLocalSegment(initiator, name) == -1);
}

/* Somebody is at a port, and says nothing: a request to its segment fails alone, also where it is not waited for anew. */
static void silent(transfer_engine_t initiator, segment_id_t segment, int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
    CHECK(bind(listener, (struct sockaddr *)&at, sizeof at) == 0 && listen(listener, 8) == 0);
    struct transfer_request requests[2] = {
        {OPCODE_WRITE, local, segment, (uint64_t)(uintptr_t)remote, 8},
        {OPCODE_WRITE, local, LOCAL_SEGMENT, (uint64_t)(uintptr_t)(local + 100), 8},
    };
    for (int round = 0; round < 2; round++) {
        batch_id_t batch = allocateBatchID(initiator, 2);
        CHECK(submitTransfer(initiator, batch, requests, 2) == 0);
        CHECK(ended(initiator, batch, 0) == STATUS_FAILED);
        CHECK(strstr(millstream_last_error(), round == 0 ? "gave no whole reply" : "did not answer"));
        CHECK(ended(initiator, batch, 1) == STATUS_COMPLETED);
        CHECK(freeBatchID(initiator, batch) == 0);
    }
    close(listener);
}

/* The target ends: its requests fail, at once or later, and the engine goes on. */
static void gone(transfer_engine_t target, transfer_engine_t initiator)
{
    char name[256];
    CHECK(getLocalIpAndPort(target, name, sizeof name) == 0);
    segment_id_t segment = open_other(initiator, target);
    CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote, 8) == STATUS_COMPLETED);
    destroyTransferEngine(target);
    CHECK(transfer(initiator, OPCODE_WRITE, local, segment, remote, 8) == STATUS_FAILED);
    CHECK(transfer(initiator, OPCODE_READ, local, segment, remote, 8) == STATUS_FAILED);
    silent(initiator, segment, atoi(strrchr(name, ':') + 1));
    CHECK(transfer(initiator, OPCODE_WRITE, local, LOCAL_SEGMENT, local + 100, 8) == STATUS_COMPLETED);
}

int main(void)
{
    transfer_engine_t target = new_engine("tcp"), initiator = new_engine("tcp");
    CHECK(registerLocalMemory(target, remote, LENGTH, "*", 1) == 0);
    CHECK(registerLocalMemory(initiator, local, LENGTH, "*", 1) == 0);
    segment_id_t segment = open_other(initiator, target);
    installed_late("tcp");
    installed_late("shm");
    installed_late("rdma");
    mixed(initiator, segment);
    borrowed_twice();
    messages(target, initiator, segment);
    segments(target, initiator, segment);
    gone(target, initiator);
    destroyTransferEngine(initiator);
    return 0;
}
