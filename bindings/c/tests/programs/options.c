/* Requests with options: on their terms, all or none, and a code for each reason. The argument is a policy file. */
#include "check.h"

#define LENGTH 65536

static char local[LENGTH], remote[LENGTH];

static void creating(const char *setting)
{
    const char *wrong[] = {"no.such.setting=1", NULL};
    CHECK(!millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, wrong, 1));
    CHECK(strstr(millstream_last_error(), "no.such.setting"));
    CHECK(!millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, wrong + 1, 1));
    CHECK(strstr(millstream_last_error(), "a setting is null"));
    CHECK(!millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, NULL, 1));
    CHECK(!millstream_create_engine(NULL, "127.0.0.1", NULL, &setting, 1));
    transfer_engine_t plain = millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, NULL, 0);
    CHECK(plain);
    destroyTransferEngine(plain);
}

/* From an engine without a transport to one with tcp, by way of a third one. */
static void relayed(void)
{
    static char source[4096], memory[4096];
    const char *is_relay = "tcp.relay=true";
    char name[256], setting[300];
    transfer_engine_t target = new_engine("tcp");
    CHECK(registerLocalMemory(target, memory, sizeof memory, "*", 1) == 0);
    transfer_engine_t relay = millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, &is_relay, 1);
    CHECK(relay && installTransport(relay, "tcp", NULL));
    CHECK(getLocalIpAndPort(relay, name, sizeof name) == 0);
    snprintf(setting, sizeof setting, "tcp.relays=%s", name);
    const char *settings = setting;
    transfer_engine_t initiator = millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, &settings, 1);
    CHECK(initiator && installTransport(initiator, "relay", NULL));
    CHECK(registerLocalMemory(initiator, source, sizeof source, "*", 1) == 0);
    memset(source, 9, sizeof source);
    segment_id_t segment = open_other(initiator, target);
    CHECK(transfer(initiator, OPCODE_WRITE, source, segment, memory, sizeof memory) == STATUS_COMPLETED);
    CHECK(memory[0] == 9 && memory[sizeof memory - 1] == 9);
    destroyTransferEngine(initiator);
    destroyTransferEngine(relay);
    /* Without a name there is nobody to ask. */
    CHECK(!installTransport(target, "relay", NULL));
    CHECK(strstr(millstream_last_error(), "tcp.relays"));
    destroyTransferEngine(target);
}

int main(int count, char **arguments)
{
    CHECK(count == 2);
    relayed();
    char setting[1024];
    snprintf(setting, sizeof setting, "transfer.policy_file=%s", arguments[1]);
    creating(setting);
    const char *settings[] = {setting, "transfer.policy=tent"};
    transfer_engine_t engine = millstream_create_engine("P2PHANDSHAKE", "127.0.0.1", NULL, settings, 2);
    transfer_engine_t target = new_engine("tcp");
    CHECK(engine && installTransport(engine, "tcp", NULL));
    CHECK(registerLocalMemory(engine, local, LENGTH, "*", 1) == 0);
    CHECK(registerLocalMemory(target, remote, LENGTH, "*", 1) == 0);
    segment_id_t segment = open_other(engine, target);
    uint64_t at = (uint64_t)(uintptr_t)remote;
    struct transfer_request good = {OPCODE_WRITE, local, segment, at, 4096};
    batch_id_t batch = allocateBatchID(engine, 4);

    /* What they say is done. */
    memset(local, 7, LENGTH);
    struct millstream_submit_options options = {.size = sizeof options};
    CHECK(millstream_submit(engine, batch, &good, 1, NULL) == 0);
    options.priority = MILLSTREAM_PRIORITY_LATENCY;
    options.timeout_us = 60000000;
    options.transport = "tcp";
    options.policy = "some";
    options.notify_name = "who";
    options.notify_msg = "what";
    CHECK(millstream_submit(engine, batch, &good, 1, &options) == 0);
    CHECK(millstream_wait_batch(engine, batch, LONG_MS) == 0);
    CHECK(ended(engine, batch, 0) == STATUS_COMPLETED && ended(engine, batch, 1) == STATUS_COMPLETED);
    CHECK(remote[4095] == 7 && remote[4096] == 0);
    int messages = 0;
    notify_msg_t *list;
    do {
        list = getNotifsFromEngine(target, &messages);
    } while (!list);
    CHECK(messages == 1 && strcmp(list[0].name, "who") == 0 && strcmp(list[0].msg, "what") == 0);
    CHECK(freeNotifsMsgBuf(list, messages) == 0);

    /* It goes together with calls of the original, whose tasks may have failed. */
    struct transfer_request outside = {OPCODE_WRITE, local, segment, at + LENGTH, 10};
    CHECK(submitTransfer(engine, batch, &outside, 1) == 0);
    CHECK(millstream_submit(engine, batch, &good, 1, NULL) == 0);
    CHECK(ended(engine, batch, 2) == STATUS_FAILED && ended(engine, batch, 3) == STATUS_COMPLETED);
    CHECK(millstream_submit(engine, batch, &good, 1, NULL) == 2);
    CHECK(freeBatchID(engine, batch) == 0);

    /* All or none, and why. */
    batch = allocateBatchID(engine, 100);
    struct {
        struct transfer_request request;
        int code;
    } refused[] = {
        {{OPCODE_WRITE, local, segment, at, 0}, MILLSTREAM_ZERO_LENGTH},
        {{OPCODE_WRITE, local, segment, UINT64_MAX, 10}, MILLSTREAM_TARGET_OUT_OF_RANGE},
        {outside, MILLSTREAM_TARGET_OUT_OF_RANGE},
        {{OPCODE_WRITE, local, segment + 1, at, 10}, MILLSTREAM_UNKNOWN_SEGMENT},
        {{OPCODE_WRITE, setting, segment, at, 10}, 3},
        {{5, local, segment, at, 10}, 1},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        struct transfer_request both[2] = {good, refused[i].request};
        int code = millstream_submit(engine, batch, both, 2, NULL);
        if (code != refused[i].code)
            fprintf(stderr, "case %zu: %d\n", i, code);
        CHECK(code == refused[i].code);
    }
    struct {
        struct millstream_submit_options options;
        int code;
    } terms[] = {
        {{.size = sizeof options - 1}, 1},
        {{.size = sizeof options, .durable = 2}, 1},
        {{.size = sizeof options, .durable = -1}, 1},
        {{.size = sizeof options, .durable = 1}, MILLSTREAM_NOT_DURABLE},
        {{.size = sizeof options, .priority = 4}, 1},
        {{.size = sizeof options, .transport = "\xff"}, 1},
        {{.size = sizeof options, .transport = "pigeon"}, MILLSTREAM_UNKNOWN_TRANSPORT},
        {{.size = sizeof options, .transport = "rdma"}, MILLSTREAM_NOT_SERVED},
        {{.size = sizeof options, .policy = "none"}, MILLSTREAM_UNKNOWN_POLICY},
        {{.size = sizeof options, .intent = "none"}, MILLSTREAM_UNKNOWN_INTENT},
        {{.size = sizeof options, .policy = "some", .transport = "shm"}, MILLSTREAM_HINT_NOT_ALLOWED},
        {{.size = sizeof options, .policy = "small"}, MILLSTREAM_OVER_LIMIT},
    };
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++) {
        int code = millstream_submit(engine, batch, &good, 1, &terms[i].options);
        if (code != terms[i].code)
            fprintf(stderr, "terms %zu: %d\n", i, code);
        CHECK(code == terms[i].code);
    }
    CHECK(strstr(millstream_last_error(), "split the submission"));
    struct transfer_status status;
    CHECK(getTransferStatus(engine, batch, 0, &status) == 1);
    CHECK(freeBatchID(engine, batch) == 0);
    destroyTransferEngine(engine);
    CHECK(millstream_submit(engine, batch, &good, 1, NULL) == 1);
    destroyTransferEngine(target);
    return 0;
}
