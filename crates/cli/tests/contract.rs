//! The contract of the command line: commands, exit statuses, sentences, JSON.

mod common;

use common::{Folder, Output, Running, address, millstream, node, run, transfer};

const COMMANDS: [&str; 17] = [
    "demo",
    "node",
    "put",
    "get",
    "bench",
    "controller",
    "switch",
    "allreduce",
    "collective",
    "lab",
    "top",
    "topology",
    "config",
    "doctor",
    "sim",
    "rdma",
    "completions",
];

#[test]
fn help_lists_every_command_and_each_has_its_own() {
    let help = run(&["--help"]).success().stdout;
    for command in COMMANDS {
        assert!(help.contains(&format!("\n  {command} ")), "{command} is not in {help}");
        let own = run(&[command, "--help"]).success().stdout;
        assert!(own.contains("Usage: millstream"), "{own}");
    }
    for (group, commands) in [
        ("bench", &["transfer", "allreduce", "collective"][..]),
        ("lab", &["up", "status", "exec", "down"]),
        ("rdma", &["pingpong", "ud-pingpong", "send-bw", "write-bw", "read-bw", "atomic"]),
    ] {
        let help = run(&[group, "--help"]).success().stdout;
        for command in commands {
            assert!(help.contains(&format!("\n  {command} ")), "{command} is not in {help}");
        }
    }
    assert!(run(&["--version"]).success().stdout.starts_with("millstream 0."));
}

#[test]
fn no_command_at_all_is_a_usage_error_that_shows_the_commands() {
    let output = run(&[]);
    assert_eq!(output.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(output.stderr.contains("allreduce"), "{}", output.stderr);
}

#[test]
fn what_is_not_there_yet_says_so() {
    let output = run(&["sim", "--scenario", "a/file.toml"]);
    let sentence = output.failure(2);
    assert!(sentence.starts_with("not yet: "), "{sentence}");
    assert!(output.stdout.is_empty());
}

#[test]
fn bad_usage_is_told_in_one_sentence() {
    let allreduce = |arguments: [&'static str; 4]| {
        let common =
            ["allreduce", "--controller=127.0.0.1:1", "--group=g", "--dtype=int32", "--op=sum"];
        [&common[..], &arguments[..]].concat()
    };
    for (arguments, expected) in [
        (vec!["frobnicate"], "frobnicate"),
        (vec!["sim", "--seed", "x"], "--seed"),
        (vec!["sim", "--runs", "0"], "--runs"),
        (vec!["sim", "--loss", "200%"], "write 10% or 0.1"),
        (vec!["sim", "--scenario", "nothing"], "allreduce"),
        (vec!["sim", "--hosts", "65"], "1 to 64"),
        (vec!["controller", "--fan-in", "65"], "65 is not in 1..=64"),
        (vec!["controller", "--max-ranks", "65537"], "65537 is not in 1..=65536"),
        (vec!["bench", "allreduce", "--fan-in", "0"], "0 is not in 1..=64"),
        (vec!["bench", "allreduce", "--hosts=65", "--fan-in=2"], "has up to 64 hosts"),
        (vec!["sim", "--seed", "18446744073709551615", "--runs", "2"], "2^64"),
        (vec!["node", "--name=a", "--metadata=p2p", "--protocol=rdma", "--buffer=12XB"], "TiB"),
        (vec!["node", "--name=a", "--metadata=p2p", "--protocol=rdma", "--buffer=0"], "--buffer 0"),
        (vec!["node", "--name=a", "--metadata=p2p", "--protocol=ip", "--buffer=1"], "rdma:soft"),
        (vec!["node", "--name=a", "--metadata=ftp", "--protocol=rdma", "--buffer=1"], "p2p"),
        (vec!["put", "--metadata=p2p"], "--segment"),
        (vec!["put", "--segment=a:1", "--offset", "-1", "f"], "-1 is less than 0"),
        (vec!["put", "--segment=a:1", "--offset=-1KiB", "f"], "-1KiB is less than 0"),
        (vec!["put", "--segment=a:1", "--offset=18446744073709551616", "f"], "more than 2^64 - 1"),
        (vec!["put", "--segment=a:1", "--offset=16777216TiB", "f"], "more than 2^64 - 1"),
        (vec!["get", "--segment=a:1", "--length=1Tb", "f"], "GB, TB (powers of 1000)"),
        (vec!["get", "--segment=a:1", "--timeout=5", "f"], "us, ms, s, m, h"),
        (vec!["completions", "tcsh"], "bash, zsh, fish"),
        (vec!["rdma", "pingpong", "--mtu=1500"], "1024"),
        (vec!["rdma", "pingpong", "--iters=0"], "--iters"),
        (vec!["rdma", "pingpong", "--size=2GiB"], "--size"),
        (vec!["rdma", "ud-pingpong", "--size=4097"], "4096 bytes"),
        (vec!["rdma", "ud-pingpong", "--mtu=1024"], "--mtu"),
        (vec!["rdma", "pingpong", "--device=soft-mlx5_0"], "soft-127.0.0.2"),
        (vec!["rdma", "pingpong", "--device=soft-127.0.0.1", "--gid-index=1"], "--bind"),
        (vec!["rdma", "write-bw", "--device=mlx5_0", "--no-segmentation-offload"], "mlx5_0"),
        (vec!["rdma", "write-bw", "--device=mlx5_0", "--driver=udp"], "mlx5_0"),
        (vec!["rdma", "write-bw", "--driver=raw"], "udp or packet"),
        (vec!["rdma", "write-bw", "--size=0"], "--size 0"),
        (vec!["rdma", "write-bw", "--size=2GiB"], "--size"),
        (vec!["rdma", "write-bw", "--size=2", "--all"], "--all"),
        (vec!["rdma", "read-bw", "--iters=0"], "--iters"),
        (vec!["rdma", "read-bw", "--iters=1", "--duration=1s"], "--duration"),
        (vec!["rdma", "read-bw", "--duration=0s"], "--duration"),
        (vec!["rdma", "send-bw", "--qps=257"], "1 to 256"),
        (vec!["rdma", "send-bw", "--latency", "--qps=2"], "one queue pair"),
        (vec!["rdma", "send-bw", "--tx-depth=0"], "1 to 16384"),
        (vec!["rdma", "send-bw", "--mtu=1500"], "1024"),
        (vec!["rdma", "atomic", "--size=16"], "8 bytes"),
        (vec!["rdma", "atomic", "--all"], "8 bytes"),
        (vec!["rdma", "atomic", "--op=xor"], "compare-swap"),
        (vec!["rdma", "pingpong", "--device=soft-127.0.0.1", "--bind=127.0.0.1"], "--bind"),
        (allreduce(["--world=2", "--rank=2", "--size=4", "--verify"]), "--rank 2"),
        (allreduce(["--world=65537", "--rank=2", "--size=4", "--verify"]), "--world"),
        (allreduce(["--world=2", "--rank=1", "--size=5", "--verify"]), "4 bytes"),
        (allreduce(["--world=2", "--rank=1", "--size=4", "--mode=read"]), "write, send"),
        (vec!["bench", "collective", "--collective=allreduce,scan"], "allgather"),
        (vec!["bench", "collective", "--op=median"], "bxor"),
        (vec!["bench", "collective", "--dtype=fp8"], "bf16"),
        (vec!["bench", "collective", "--dtype=fp16", "--op=band"], "none of fp16"),
        (vec!["bench", "collective", "--hosts=2", "--root=2"], "--root 2: ranks are 0 to 1"),
        (vec!["bench", "collective", "--dtype=int64", "--size=12"], "8 bytes"),
        (vec!["bench", "transfer", "--duration=5"], "250ms or 5s"),
    ] {
        let output = run(&arguments);
        let sentence = output.failure(2);
        assert!(sentence.contains(expected), "{arguments:?}: {sentence}");
        assert!(!sentence.contains("use '--"), "{arguments:?}: {sentence}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn what_fails_is_told_in_one_sentence() {
    let folder = Folder::new();
    let (_node, segment) = node("1MiB", &[]);
    let (missing, short) = (folder.file("missing"), folder.file("short"));
    std::fs::write(&short, [1; 10]).unwrap();
    let target = folder.file("target");
    let nowhere = format!("{}:1", address());
    let check = |output: Output, code, expected: &str| {
        let sentence = output.failure(code);
        assert!(sentence.contains(expected), "{sentence}");
        assert!(output.stdout.is_empty());
    };
    let put = |segment: &str, more: &[&str]| transfer(&["put"], segment, more);
    let get = |segment: &str, more: &[&str]| transfer(&["get"], segment, more);
    check(put(&segment, &["--offset=0", &missing]), 1, &missing);
    check(put(&segment, &["--offset=0", folder.path().to_str().unwrap()]), 2, "is a directory");
    check(put(&segment, &["--offset=0", "--length=11", &short]), 2, "has only 10 bytes");
    check(put(&segment, &["--offset=1048567", &short]), 2, "do not fit a buffer of 1048576 bytes");
    check(get(&segment, &["--offset=1MiB", "--length=1", &target]), 2, "1048576");
    check(get(&segment, &["--offset=2MiB", &target]), 2, "2097152");
    check(get(&segment, &["--offset=0", &folder.file("no/folder")]), 1, "no/folder");
    check(get(&nowhere, &["--offset=0", &target]), 1, &nowhere);
    check(get("no such name", &["--offset=0", &target]), 2, "no such name");
    let bench =
        ["--op=read", "--batch-size=1", "--threads=1", "--duration=1ms", "--block-size=2MiB"];
    check(transfer(&["bench", "transfer"], &segment, &bench), 2, "1048576 bytes");
    assert!(!std::path::Path::new(&target).exists(), "nothing was made of what failed");
}

#[test]
fn ports_and_addresses_in_use_are_told() {
    let (_node, segment) = node("1KiB", &[]);
    let address = segment.split(':').next().unwrap();
    // The packet driver has its address to itself, as a switch does.
    let packet = run(&["rdma", "write-bw", "--driver=packet", "--bind", address]);
    let sentence = packet.failure(1);
    assert!(sentence.contains("UDP port 4791") && sentence.contains("the packet driver"));
    let taken = common::address();
    let _taken = std::net::UdpSocket::bind((taken.as_str(), 4791)).unwrap();
    let second = run(&[
        "node",
        "--name=b",
        "--metadata=p2p",
        "--protocol=rdma",
        "--buffer=1",
        "--bind",
        &taken,
    ]);
    assert!(second.failure(1).contains("UDP port 4791"), "{}", second.stderr);
    let foreign = run(&["rdma", "pingpong", "--bind=192.0.2.1", "127.0.0.1"]);
    assert_eq!(foreign.code(), Some(1));

    let listen = format!("{}:0", common::address());
    let mut first =
        Running::start("controller", millstream().args(["controller", "--listen", &listen]));
    let listen = first.ready()["listen"].as_str().unwrap().to_owned();
    let second = run(&["controller", "--listen", &listen]);
    assert!(second.failure(1).contains(&listen), "{}", second.stderr);
    let switch = run(&["switch", "--controller", &listen, "--name=s", "--bind", address]);
    assert!(switch.failure(1).contains("UDP port 4791"), "{}", switch.stderr);
}

#[test]
fn daemons_end_with_0_when_told_to() {
    for signal in ["TERM", "INT"] {
        let (node, _) = node("1KiB", &[]);
        node.signal(signal);
        node.output().success();
        let listen = format!("{}:0", address());
        let mut controller =
            Running::start("controller", millstream().args(["controller", "--listen", &listen]));
        let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
        let bind = address();
        let arguments = ["switch", "--controller", &listen, "--name=s", "--bind", &bind];
        let mut switch = Running::start("switch", millstream().args(arguments));
        assert_eq!(switch.ready()["address"], bind.as_str());
        switch.signal(signal);
        switch.output().success();
        controller.signal(signal);
        controller.output().success();
    }
}
