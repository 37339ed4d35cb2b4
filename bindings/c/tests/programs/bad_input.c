/* What is null, wrong, freed or destroyed is a code, and the engine goes on. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>

static char memory[4096];

/* No function takes this for an engine. */
static void no_engine(transfer_engine_t engine)
{
    char text[64];
    int size = 7;
    size_t count = 1;
    void *addresses[1] = {memory};
    struct buffer_entry buffer = {memory, sizeof memory};
    struct transfer_request request = {OPCODE_WRITE, memory, LOCAL_SEGMENT, (uint64_t)(uintptr_t)memory, 1};
    struct transfer_status status = {42, 42};
    struct notify_msg message = {"a", "b"};
    nic_load_stat_t load;
    CHECK(discoverTopology(engine) == -1);
    CHECK(getLocalIpAndPort(engine, text, sizeof text) == -1);
    CHECK(!installTransport(engine, "tcp", NULL));
    CHECK(uninstallTransport(engine, "tcp") == -1);
    CHECK(openSegment(engine, "127.0.0.1:1") == -1);
    CHECK(openSegmentNoCache(engine, "127.0.0.1:1") == -1);
    CHECK(closeSegment(engine, 0) == -1);
    CHECK(removeLocalSegment(engine, "a") == -1);
    CHECK(syncSegmentCache(engine) == -1);
    CHECK(warmupEfaSegment(engine, "a") == -1);
    CHECK(registerLocalMemory(engine, memory, sizeof memory, "*", 1) == -1);
    CHECK(unregisterLocalMemory(engine, memory) == -1);
    CHECK(registerLocalMemoryBatch(engine, &buffer, 1, "*") == -1);
    CHECK(unregisterLocalMemoryBatch(engine, addresses, 1) == -1);
    CHECK(allocateBatchID(engine, 1) == INVALID_BATCH);
    CHECK(submitTransfer(engine, 1, &request, 1) == 1);
    CHECK(submitTransferWithNotify(engine, 1, &request, 1, message) == 1);
    CHECK(getTransferStatus(engine, 1, 0, &status) == 1 && status.status == 42);
    CHECK(freeBatchID(engine, 1) == 1);
    CHECK(!getNotifsFromEngine(engine, &size) && size == 0);
    CHECK(genNotifyInEngine(engine, 0, message) == -1);
    CHECK(getNicLoadStats(engine, &load, &count) == -1);
    CHECK(showLinks(engine, text, sizeof text, 1) == -1);
    CHECK(millstream_wait_batch(engine, 1, 0) == -1);
    CHECK(millstream_cancel_task(engine, 1, 0) == -1);
    CHECK(millstream_register_file(engine, "/dev/null", NULL, text, sizeof text) == -1);
    CHECK(millstream_unregister_file(engine, "nvmeof/127.0.0.1:1/a") == -1);
    CHECK(*millstream_last_error());
    enableGracefulShutdown(engine);
    destroyTransferEngine(engine);
}

static void engines_that_cannot_be(void)
{
    CHECK(!createTransferEngine(NULL, "127.0.0.1", "", 0, 0));
    CHECK(!createTransferEngine("P2PHANDSHAKE", NULL, "", 0, 0));
    CHECK(!createTransferEngine("P2PHANDSHAKE", "", NULL, 0, 0));
    CHECK(!createTransferEngine("\xff\xfe", "127.0.0.1", "", 0, 0));
    CHECK(!createTransferEngine("nowhere://127.0.0.1", "127.0.0.1", "", 0, 0));
    CHECK(strstr(millstream_last_error(), "nowhere"));
}

static void transports_and_segments(transfer_engine_t engine)
{
    char text[64];
    void *matrix[1] = {"no matrix"};
    CHECK(!installTransport(engine, NULL, NULL));
    CHECK(!installTransport(engine, "carrier pigeon", NULL));
    CHECK(strstr(millstream_last_error(), "tcp"));
    CHECK(!installTransport(engine, "rdma", matrix));
    CHECK(strstr(millstream_last_error(), "matrix"));
    CHECK(installTransport(engine, "tcp", NULL) == installTransport(engine, "tcp", NULL));
    CHECK(uninstallTransport(engine, NULL) == -1);
    CHECK(uninstallTransport(engine, "tcp") == 0);
    CHECK(getLocalIpAndPort(engine, NULL, 10) == -1);
    CHECK(getLocalIpAndPort(engine, text, 0) == -1);
    memset(text, 'x', sizeof text);
    CHECK(getLocalIpAndPort(engine, text, 5) == 0 && strcmp(text, "127.") == 0 && text[5] == 'x');
    CHECK(openSegment(engine, NULL) == -1);
    CHECK(openSegment(engine, "") == -1);
    CHECK(openSegment(engine, "///") == -1);
    CHECK(openSegment(engine, "no name") == -1);
    CHECK(openSegment(engine, "127.0.0.1:1") == -1);
    CHECK(strstr(millstream_last_error(), "127.0.0.1:1"));
    CHECK(closeSegment(engine, LOCAL_SEGMENT) == 0);
    CHECK(closeSegment(engine, 99) == -1);
    CHECK(closeSegment(engine, -1) == -1);
    CHECK(closeSegment(engine, INT32_MIN) == -1);
    CHECK(removeLocalSegment(engine, NULL) == -1);
    CHECK(removeLocalSegment(engine, "/") == -1);
    CHECK(warmupEfaSegment(engine, NULL) == 0);
}

static void registrations(transfer_engine_t engine)
{
    struct buffer_entry twice[2] = {{memory, 100}, {memory + 50, 100}};
    struct buffer_entry apart[2] = {{memory, 100}, {memory + 100, 100}};
    void *addresses[3] = {memory, memory + 1, memory + 100};
    CHECK(registerLocalMemory(engine, NULL, 10, "*", 1) == -1);
    CHECK(registerLocalMemory(engine, memory, 0, "*", 1) == -1);
    CHECK(registerLocalMemory(engine, memory, SIZE_MAX, "*", 1) == -1);
    CHECK(registerLocalMemory(engine, (void *)16, 16, "*", 1) == -1);
    CHECK(registerLocalMemory(engine, memory, 10, "\xff", 1) == -1);
    CHECK(registerLocalMemory(engine, memory, sizeof memory, NULL, 1) == 0);
    CHECK(registerLocalMemory(engine, memory, sizeof memory, "*", 1) == -7);
    CHECK(registerLocalMemory(engine, memory + 100, 1, "*", 0) == -7);
    CHECK(unregisterLocalMemory(engine, memory + 1) == -3);
    CHECK(unregisterLocalMemory(engine, NULL) == -3);
    CHECK(unregisterLocalMemory(engine, memory) == 0);
    CHECK(unregisterLocalMemory(engine, memory) == -3);
    CHECK(registerLocalMemoryBatch(engine, NULL, 1, "*") == -1);
    CHECK(registerLocalMemoryBatch(engine, (buffer_entry_t *)4, 1, "*") == -1);
    CHECK(registerLocalMemoryBatch(engine, apart, SIZE_MAX, "*") == -1);
    CHECK(registerLocalMemoryBatch(engine, NULL, 0, "*") == 0);
    CHECK(registerLocalMemoryBatch(engine, twice, 2, "*") == -7);
    CHECK(unregisterLocalMemory(engine, memory) == -3); /* all, or none */
    CHECK(registerLocalMemoryBatch(engine, apart, 2, "cpu:0") == 0);
    CHECK(unregisterLocalMemoryBatch(engine, NULL, 2) == -1);
    CHECK(unregisterLocalMemoryBatch(engine, addresses, 3) == -3);
    CHECK(unregisterLocalMemory(engine, memory + 100) == -3); /* as many as can be */
}

/* Of an engine without files, and of one that could have them. */
static void files(transfer_engine_t without)
{
    char name[64];
    CHECK(millstream_register_file(without, "/dev/null", NULL, name, sizeof name) == -202);
    CHECK(strstr(millstream_last_error(), "nvmeof"));
    CHECK(millstream_unregister_file(without, "nvmeof/127.0.0.1:1/a") == -202);
    transfer_engine_t engine = new_engine("nvmeof");
    struct millstream_local_path places[2] = {{"a", "/x"}, {"b", "/x"}};
    const struct millstream_file_options good = {.size = sizeof good, .local_paths = places, .local_path_count = 2};
    struct millstream_file_options options = good;
    CHECK(millstream_register_file(engine, NULL, &good, name, sizeof name) == -1);
    CHECK(millstream_register_file(engine, "\xff", &good, name, sizeof name) == -1);
    CHECK(millstream_register_file(engine, "/dev/null", &good, NULL, 64) == -1);
    CHECK(strstr(millstream_last_error(), "segment_out"));
    CHECK(millstream_register_file(engine, "/", NULL, name, sizeof name) == -1);
    options.size = 0;
    CHECK(millstream_register_file(engine, "/dev/null", &options, name, sizeof name) == -1);
    CHECK(strstr(millstream_last_error(), "size is 0"));
    options = good;
    options.writable = 2;
    CHECK(millstream_register_file(engine, "/dev/null", &options, name, sizeof name) == -1);
    options = good;
    options.name = "a/b";
    CHECK(millstream_register_file(engine, "/dev/null", &options, name, sizeof name) == -1);
    CHECK(strstr(millstream_last_error(), "no name of a file"));
    options = good;
    options.local_paths = NULL;
    CHECK(millstream_register_file(engine, "/dev/null", &options, name, sizeof name) == -1);
    CHECK(strstr(millstream_last_error(), "local_paths is null"));
    options = good;
    options.local_path_count = SIZE_MAX;
    CHECK(millstream_register_file(engine, "/dev/null", &options, name, sizeof name) == -1);
    const struct {
        struct millstream_local_path place;
        const char *reason;
    } wrong[] = {
        {{NULL, "/x"}, "local_paths[1]: server is null"},
        {{"b", NULL}, "local_paths[1]: path is null"},
        {{"", "/x"}, "local_paths[1]: a server's name is one word"},
        {{"b", "x"}, "local_paths[1]: the path at the server begins with /"},
        {{"a", "/y"}, "local_paths[1]: that server has the file already"},
    };
    for (size_t index = 0; index < sizeof wrong / sizeof *wrong; index++) {
        places[1] = wrong[index].place;
        CHECK(millstream_register_file(engine, "/dev/null", &good, name, sizeof name) == -1);
        CHECK(strstr(millstream_last_error(), wrong[index].reason));
    }
    CHECK(millstream_unregister_file(engine, NULL) == -1);
    CHECK(millstream_unregister_file(engine, "nvmeof/127.0.0.1:1/a") == -3);
    destroyTransferEngine(engine);
}

static void batches(transfer_engine_t engine)
{
    struct transfer_request requests[3] = {
        {OPCODE_WRITE, memory, LOCAL_SEGMENT, (uint64_t)(uintptr_t)(memory + 2000), 100},
        {OPCODE_WRITE, memory, LOCAL_SEGMENT, (uint64_t)(uintptr_t)(memory + 2000), 100},
        {OPCODE_WRITE, memory, LOCAL_SEGMENT, (uint64_t)(uintptr_t)(memory + 2000), 100},
    };
    struct transfer_status status = {42, 42};
    struct notify_msg nothing = {NULL, NULL};
    CHECK(registerLocalMemory(engine, memory, sizeof memory, "*", 1) == 0);
    CHECK(allocateBatchID(engine, 0) == INVALID_BATCH);
    CHECK(allocateBatchID(engine, SIZE_MAX) == INVALID_BATCH);
    batch_id_t batch = allocateBatchID(engine, 2);
    CHECK(batch != INVALID_BATCH && batch != 0);
    CHECK(submitTransfer(engine, batch, NULL, 1) == 1);
    CHECK(submitTransfer(engine, batch, NULL, 0) == 0);
    CHECK(submitTransfer(engine, batch, requests, SIZE_MAX) == 1);
    CHECK(submitTransfer(engine, batch, requests, 3) == 2);
    CHECK(strstr(millstream_last_error(), "Exceed capacity"));
    CHECK(submitTransferWithNotify(engine, batch, requests, 1, nothing) == 1);
    requests[1].opcode = 2;
    CHECK(submitTransfer(engine, batch, requests, 2) == 1);
    requests[1].opcode = -1;
    CHECK(submitTransfer(engine, batch, requests, 2) == 1);
    requests[1].opcode = OPCODE_READ;
    requests[1].target_id = 77;
    CHECK(submitTransfer(engine, batch, requests, 2) == 1);
    requests[1].target_id = -1;
    CHECK(submitTransfer(engine, batch, requests, 2) == 1);
    requests[1].target_id = LOCAL_SEGMENT;
    /* All or none: nothing of these counts. */
    CHECK(getTransferStatus(engine, batch, 0, &status) == 1);
    CHECK(submitTransfer(engine, batch, requests, 2) == 0);
    CHECK(submitTransfer(engine, batch, requests, 1) == 2);
    CHECK(getTransferStatus(engine, batch, 0, NULL) == 1);
    CHECK(getTransferStatus(engine, batch, 2, &status) == 1);
    CHECK(getTransferStatus(engine, batch, SIZE_MAX, &status) == 1);
    CHECK(ended(engine, batch, 0) == STATUS_COMPLETED && ended(engine, batch, 1) == STATUS_COMPLETED);
    CHECK(millstream_cancel_task(engine, batch, 2) == -1);
    CHECK(freeBatchID(engine, batch + 1) == 1);
    CHECK(freeBatchID(engine, INVALID_BATCH) == 1);
    CHECK(freeBatchID(engine, 0) == 1);
    CHECK(freeBatchID(engine, batch) == 0);
    CHECK(freeBatchID(engine, batch) == 1);
    CHECK(getTransferStatus(engine, batch, 0, &status) == 1);
    CHECK(submitTransfer(engine, batch, requests, 1) == 1);
    CHECK(millstream_wait_batch(engine, batch, 0) == -1);
    CHECK(strstr(millstream_last_error(), "freed"));
    /* Of another engine. */
    transfer_engine_t other = new_engine("tcp");
    batch = allocateBatchID(other, 1);
    CHECK(submitTransfer(engine, batch, requests, 1) == 1);
    CHECK(freeBatchID(engine, batch) == 1);
    /* One with a batch that nobody frees. */
    destroyTransferEngine(other);
    no_engine(other);
    CHECK(unregisterLocalMemory(engine, memory) == 0);
}

static void messages(transfer_engine_t engine)
{
    int size = 0;
    struct notify_msg message = {"name", "text"}, none = {NULL, "text"}, empty = {"name", NULL};
    CHECK(!getNotifsFromEngine(engine, NULL));
    CHECK(genNotifyInEngine(engine, LOCAL_SEGMENT, none) == -1);
    CHECK(genNotifyInEngine(engine, LOCAL_SEGMENT, empty) == -1);
    CHECK(genNotifyInEngine(engine, 77, message) == -200);
    CHECK(genNotifyInEngine(engine, UINT64_MAX, message) == -200);
    CHECK(genNotifyInEngine(engine, LOCAL_SEGMENT, message) == 0);
    notify_msg_t *list = getNotifsFromEngine(engine, &size);
    CHECK(list && size == 1 && strcmp(list[0].name, "name") == 0 && strcmp(list[0].msg, "text") == 0);
    CHECK(freeNotifsMsgBuf(list, -1) == -1);
    CHECK(freeNotifsMsgBuf(list, size) == 0);
    CHECK(freeNotifsMsgBuf(NULL, 3) == 0);
    CHECK(!getNotifsFromEngine(engine, &size) && size == 0);
}

static void reports(transfer_engine_t engine)
{
    char text[512];
    size_t count = 1;
    nic_load_stat_t load;
    CHECK(showLinks(engine, text, sizeof text, 1) == 0 && strstr(text, "\"local_nics\""));
    CHECK(showLinks(engine, text, sizeof text, 0) == 0 && strstr(text, "Local NICs"));
    CHECK(showLinks(engine, NULL, 10, 0) == -1);
    CHECK(showLinks(engine, text, 0, 0) == -1);
    CHECK(getNicLoadStats(engine, NULL, &count) == -1);
    CHECK(getNicLoadStats(engine, &load, NULL) == -1);
    CHECK(getNicLoadStats(engine, &load, &count) == 0 && count == 0);
}

/* Memory that cannot be written is not registered, and requests with it fail, and nothing else. */
static void read_only(transfer_engine_t engine, void *constant)
{
    static char source[4096], target[4096];
    transfer_engine_t other = new_engine("tcp");
    CHECK(registerLocalMemory(engine, constant, 4096, "*", 1) == -1);
    CHECK(strstr(millstream_last_error(), "writ"));
    CHECK(registerLocalMemory(other, target, sizeof target, "*", 1) == 0);
    segment_id_t segment = open_other(engine, other);
    memset(source, 3, sizeof source);
    memset(target, 3, sizeof target);
    CHECK(transfer(engine, OPCODE_READ, constant, segment, target, sizeof target) == STATUS_FAILED);
    CHECK(((char *)constant)[0] == 0);
    CHECK(transfer(engine, OPCODE_WRITE, constant, segment, target, sizeof target) == STATUS_FAILED);
    CHECK(target[0] == 3 && target[4095] == 3);
    memset(source, 4, sizeof source);
    CHECK(transfer(engine, OPCODE_WRITE, source, segment, target, sizeof target) == STATUS_COMPLETED);
    CHECK(target[0] == 4 && target[4095] == 4);
    destroyTransferEngine(other);
}

int main(void)
{
    void *constant = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(constant != MAP_FAILED);
    CHECK(*millstream_last_error() == 0);
    no_engine(NULL);
    no_engine((transfer_engine_t)1);
    no_engine((transfer_engine_t)UINTPTR_MAX);
    no_engine(memory);
    engines_that_cannot_be();
    transfer_engine_t engine = new_engine("tcp");
    transports_and_segments(engine);
    registrations(engine);
    files(engine);
    batches(engine);
    messages(engine);
    reports(engine);
    read_only(engine, constant);
    destroyTransferEngine(engine);
    no_engine(engine);
    return 0;
}
