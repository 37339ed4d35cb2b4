//! Faults made on purpose, at every command: each is told in one sentence that says what failed,
//! where, why, and what to do, with the exit status of the contract and in bounded time.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::thread;
use std::time::Duration;

use common::{Folder, Output, Running, address, is_installed, millstream, serve, skip};

/// No fault takes longer to be told, on a busy machine either.
const BOUND: Duration = Duration::from_secs(60);

/// What `bench transfer` does.
const BENCH: &str = "--op write --block-size 4KiB --batch-size 1 --threads 1 --duration 1s";

/// What no user should have to read.
const INTERNAL: [&str; 12] = [
    "failed to fill whole buffer",
    "early eof",
    "unexpected end of file",
    "Some(",
    "None",
    "Err(",
    "Os {",
    "kind:",
    "panicked",
    "unwrap",
    "RUST_BACKTRACE",
    "error -",
];

/// A command line, its exit status, and the words that its sentence must have.
struct Fault {
    arguments: Vec<String>,
    status: i32,
    words: Vec<String>,
}

fn fault(arguments: &str, status: i32, words: &[&str]) -> Fault {
    let arguments = arguments.split(' ').map(str::to_owned).collect();
    Fault { arguments, status, words: words.iter().map(|&word| word.to_owned()).collect() }
}

/// What holds for every failure.
fn check(what: &str, output: &Output, status: i32, words: &[String]) {
    let sentence = output.failure(status);
    for word in words {
        assert!(sentence.contains(word.as_str()), "{what}\n{word:?} is not in: {sentence}");
    }
    for word in INTERNAL {
        assert!(!output.stderr.contains(word), "{what}\n{word:?} is in: {}", output.stderr);
    }
    // A number is no reason: it stands beside the words that it means.
    for (at, _) in sentence.match_indices("(os error") {
        let before = sentence[..at].trim_end();
        assert!(before.ends_with(|c: char| c.is_alphabetic()), "{what}\n{sentence}");
    }
    assert!(!sentence.ends_with(':') && sentence.len() < 600, "{what}\n{sentence}");
}

/// Makes these faults, all at a time.
fn make(faults: Vec<Fault>) {
    thread::scope(|scope| {
        for Fault { arguments, status, words } in faults {
            scope.spawn(move || {
                let mut command = millstream();
                let output =
                    Running::start("the fault", command.args(&arguments)).output_within(BOUND);
                check(&arguments.join(" "), &output, status, &words);
            });
        }
    });
}

/// Listens, and does this with everyone who connects.
fn listen(then: fn(TcpStream)) -> (String, String) {
    let host = address();
    let listener = TcpListener::bind((host.as_str(), 0)).unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    // Ends with the test's process.
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || then(stream));
        }
    });
    (host, port)
}

fn web_server(mut stream: TcpStream) {
    let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    say_goodbye(stream);
}

fn silent(mut stream: TcpStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

fn closing(stream: TcpStream) {
    drop(stream);
}

fn garbage(mut stream: TcpStream) {
    let _ = stream.write_all(&[0xfe; 1000]);
    say_goodbye(stream);
}

/// A controller of a version that there is not yet.
fn of_another_version(mut stream: TcpStream) {
    let json = br#"{"version":99,"type":"ping"}"#;
    let _ = stream.write_all(&[&(json.len() as u32).to_be_bytes()[..], json].concat());
    say_goodbye(stream);
}

/// Closes in a way that the other side gets all of it.
fn say_goodbye(mut stream: TcpStream) {
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.read_to_end(&mut Vec::new());
}

/// The commands that connect to a port, as they are given it; the last one is `allreduce`.
fn clients(host: &str, port: &str) -> [String; 5] {
    let [one, two, three, four] = [(); 4].map(|()| address());
    [
        format!("put --bind {one} --segment {host}:{port} /proc/version"),
        format!("get --bind {two} --segment {host}:{port} --length 1 /dev/null"),
        format!("rdma write-bw --bind {three} --timeout 1s --port {port} {host}"),
        format!("rdma pingpong --bind {four} --timeout 1s --port {port} {host}"),
        format!(
            "allreduce --controller {host}:{port} --group g --world 2 --rank 0 --size 4 \
             --dtype int32 --op sum --timeout 5s --bind {}",
            address()
        ),
    ]
}

#[test]
fn peers_that_are_something_else() {
    let mut faults = Vec::new();
    for (then, nodes, servers, controllers) in [
        (
            web_server as fn(TcpStream),
            &["HTTP/1.1", "is it a node?"],
            &["is no ", "HTTP/1.1 400 Bad Request\", which is HTTP"],
            &["\"HTTP\"", "does not speak this protocol"],
        ),
        (
            closing,
            &["closed the connection", "is it a node?"],
            &["is no ", "closed the connection"],
            &["was lost", "is it something else than a controller?"],
        ),
        (
            garbage,
            &["malformed", "is it a node?"],
            &["is no ", "\\xfe\\xfe"],
            &["no controller of this version", "does not speak this protocol"],
        ),
    ] {
        let (host, port) = listen(then);
        let place = format!("{host}:{port}");
        let all = clients(&host, &port);
        let words = [nodes, nodes, servers, servers, controllers];
        for (arguments, words) in all.iter().zip(words) {
            faults.push(fault(arguments, 1, &[&words[..], &[&place]].concat()));
        }
    }
    let (host, port) = listen(silent);
    for (arguments, words) in clients(&host, &port).iter().zip([
        &["no whole reply", "has it stopped"][..],
        &["no whole reply", "has it stopped"],
        &["is no write-bw server, or is busy", "said nothing for 1s"],
        &["is no pingpong server, or is busy", "said nothing for 1s"],
        &["has it stopped", "something else than a controller"],
    ]) {
        faults.push(fault(arguments, 1, &[words, &[&host]].concat()));
    }
    let (host, port) = listen(of_another_version);
    let allreduce = &clients(&host, &port)[4];
    faults.push(fault(allreduce, 1, &[&host, "version 99 of the protocol", "and this is version"]));
    make(faults);
}

#[test]
fn peers_that_are_not_there() {
    let host = address();
    let mut faults = Vec::new();
    for (arguments, words) in clients(&host, "1").iter().zip([
        &["no process listens there"][..],
        &["no process listens there"],
        &["does a write-bw server run there?", "--wait"],
        &["does a pingpong server run there?", "--wait"],
        &["cannot reach the controller", "refused"],
    ]) {
        faults.push(fault(arguments, 1, &[words, &[&host]].concat()));
    }
    let nowhere = "nowhere.invalid";
    for arguments in [
        format!("put --segment {nowhere}:5000 /proc/version"),
        format!("bench transfer --segment {nowhere}:5000 {BENCH}"),
        format!("rdma send-bw {nowhere}"),
        clients(nowhere, "5000")[4].clone(),
        format!("switch --controller {nowhere}:5000 --name s --bind {host}"),
    ] {
        faults.push(fault(&arguments, 1, &["cannot find the address of", nowhere]));
    }
    make(faults);
}

#[test]
fn addresses_and_ports_that_cannot_be() {
    // TEST-NET-1, which nobody has (RFC 5737).
    let foreign = "192.0.2.1";
    let not_ours = ["no interface of this machine has the address 192.0.2.1", "`ip address`"];
    let taken = address();
    let _taken = std::net::UdpSocket::bind((taken.as_str(), 4791)).unwrap();
    let in_use = [taken.as_str(), "UDP port 4791"];
    let listener = TcpListener::bind((taken.as_str(), 0)).unwrap();
    let listening = listener.local_addr().unwrap().port();
    make(vec![
        fault(&format!("node --buffer 1 --bind {foreign}"), 1, &not_ours),
        fault(&format!("put --bind {foreign} --segment {taken}:1 /proc/version"), 1, &not_ours),
        fault(&format!("rdma write-bw --bind {foreign}"), 1, &not_ours),
        fault(&format!("rdma ud-pingpong --bind {foreign}"), 1, &not_ours),
        fault(&format!("switch --controller {taken}:1 --name s --bind {foreign}"), 1, &not_ours),
        fault(&format!("controller --listen {foreign}:5000"), 1, &[foreign, "`ip address`"]),
        fault(&format!("node --buffer 1 --protocol rdma:soft --bind {taken}"), 1, &in_use),
        fault(&format!("rdma read-bw --bind {taken}"), 1, &in_use),
        fault(&format!("switch --controller {taken}:1 --name s --bind {taken}"), 1, &in_use),
        fault(
            &format!("controller --listen {taken}:{listening}"),
            1,
            &[&format!("{taken}:{listening}"), "another process does"],
        ),
        fault(
            &format!("rdma atomic --bind {} --port 99999", address()),
            2,
            &["--port", "99999", "65535"],
        ),
        fault(&format!("put --segment {taken}:99999 /proc/version"), 2, &["--segment", "99999"]),
        fault("controller --listen 127.0.0.1", 2, &["--listen", "127.0.0.1"]),
        fault("switch --controller localhost --name s --bind 127.0.0.1", 2, &["HOST:PORT"]),
        fault("switch --controller localhost:99999 --name s --bind 127.0.0.1", 2, &["65535"]),
    ]);
}

#[test]
fn what_the_machine_does_not_have() {
    let folder = Folder::new();
    let (missing, here) = (folder.file("missing"), folder.path().to_str().unwrap());
    let bind = address();
    make(vec![
        fault(
            "node --buffer 4000000GiB",
            1,
            &["does not give", "4294967296000000", "ask for less"],
        ),
        fault(
            &format!("node --buffer 1 --file {missing}"),
            1,
            &["cannot read", &missing, "No such file"],
        ),
        fault(&format!("node --buffer 1 --file {here}"), 2, &["--file", here, "is a directory"]),
        fault(&format!("put --segment {bind}:1 {missing}"), 1, &[&missing, "No such file"]),
        fault(&format!("put --segment {bind}:1 {here}"), 2, &[here, "directory"]),
        fault(&format!("topology --sysfs {missing}"), 1, &[&missing, "is no sysfs tree", "/sys"]),
        fault("rdma write-bw --device nosuch0", 1, &["nosuch0"]),
        fault("sim --scenario nosuch", 2, &["nosuch", "rc-chaos"]),
        fault("rdma send-bw --mtu 1500", 2, &["--mtu 1500", "1024"]),
    ]);
}

/// A server of `rdma` on an address of its own, which listens.
fn server(arguments: &str) -> (Running, String) {
    let host = address();
    let mut command = millstream();
    command.arg("rdma").args(arguments.split(' ')).args(["--bind", &host]);
    let mut server = Running::start("server", &mut command);
    server.listens(&format!("{host}:18515"));
    (server, host)
}

#[test]
fn sides_of_an_rdma_test_that_do_not_fit() {
    for (ours, theirs, words) in [
        ("write-bw", "read-bw", &["the test is read-bw here, write-bw there"][..]),
        ("write-bw", "write-bw --size 4096", &["--size is 4096 here, 65536 there"]),
        ("send-bw", "send-bw --qps 2", &["--qps is 2 here, 1 there"]),
        // It has no more to say than the exchange.
        ("pingpong --timeout 2s", "write-bw --timeout 1s", &["the server"]),
    ] {
        let (server, host) = server(ours);
        let client = format!("rdma {theirs} --bind {} {host}", address());
        let words: Vec<&str> = [words, &[&host]].concat();
        make(vec![fault(&client, 1, &words)]);
        let output = server.output_within(BOUND);
        check(ours, &output, 1, &[]);
    }
}

#[test]
fn peers_that_are_killed_in_the_middle() {
    // An rdma test.
    let (server, host) = server("write-bw --duration 60s");
    let mut client = Running::start(
        "client",
        millstream().args(["rdma", "write-bw", "--duration=60s", "--bind", &address(), &host]),
    );
    while !client.line().starts_with(" #bytes") {}
    server.signal("KILL");
    let words = [host.as_str(), "the peer does not answer", "has it ended"].map(str::to_owned);
    check("rdma write-bw, server killed", &client.output_within(BOUND), 1, &words);
    drop(server);

    // A node.
    let (node, segment) = common::node("64MiB", &[]);
    let arguments = ["get", "--segment", &segment, "--bind", &address(), "/dev/stdout"];
    let mut command = millstream();
    command.args(arguments).stdout(std::process::Stdio::piped());
    command.stderr(std::process::Stdio::piped());
    let mut get = command.spawn().unwrap();
    let mut stdout = get.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1]).unwrap();
    node.signal("KILL");
    drop(node);
    // The rest of what was under way.
    let drain = thread::spawn(move || stdout.read_to_end(&mut Vec::new()));
    let output = get.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let output = Output { status: output.status, stdout: String::new(), stderr };
    check("get, node killed", &output, 1, &[segment]);
    drain.join().unwrap().unwrap();

    // A switch, of two ranks.
    let listen = format!("{}:0", address());
    let mut controller =
        Running::start("controller", millstream().args(["controller", "--listen", &listen]));
    let listen = controller.ready()["listen"].as_str().unwrap().to_owned();
    let bind = address();
    let arguments = ["switch", "--controller", &listen, "--name=s0", "--bind", &bind];
    let mut switch = Running::start("switch", millstream().args(arguments));
    switch.ready();
    let mut hosts = ["0", "1"].map(|rank| {
        let mut command = millstream();
        command.args([
            "allreduce",
            "--path=switch",
            "--fallback=off",
            "--controller",
            &listen,
            "--group=g",
            "--world=2",
        ]);
        command.args(["--rank", rank, "--dtype=int32", "--op=sum", "--size=4MiB"]);
        Running::start("host", command.args(["--iters=100000", "--bind", &address()]))
    });
    hosts.iter_mut().for_each(|host| drop(host.line()));
    switch.signal("KILL");
    drop(switch);
    for host in hosts {
        let words = ["switch", bind.as_str(), "lost"].map(str::to_owned);
        check("allreduce, switch killed", &host.output_within(BOUND), 1, &words);
    }
}

#[test]
fn ranks_and_switches_that_are_refused() {
    let (_daemons, listen) = serve();
    let mut first = millstream();
    first.args([
        "allreduce",
        "--path=switch",
        "--fallback=off",
        "--controller",
        &listen,
        "--group=g",
        "--world=3",
        "--rank=0",
    ]);
    first.args(["--dtype=int32", "--op=sum", "--size=4", "--timeout=5s", "--bind", &address()]);
    let first = Running::start("rank 0", &mut first);
    let rank = |world: u32, rank: u32| {
        format!(
            "allreduce --controller {listen} --group g --world {world} --rank {rank} --size 4 \
             --dtype int32 --op sum --bind {}",
            address()
        )
    };
    make(vec![
        fault(
            &format!("switch --controller {listen} --name s0 --bind {}", address()),
            1,
            &[&listen, "refuses this switch", "give this one its own name"],
        ),
        fault(&rank(3, 3), 2, &["--rank 3"]),
        fault(&rank(65_537, 0), 2, &["--world"]),
    ]);
    // The other ranks never come.
    let words = ["rank 0 of 3", "group", "ranks did not join in time"].map(str::to_owned);
    check("allreduce, ranks missing", &first.output_within(BOUND), 1, &words);
}

/// Runs the command in a network namespace of its own, where all interfaces are down at first, after
/// these words of a shell. `None` where that cannot be made.
fn isolated(before: &str, arguments: &str) -> Option<Output> {
    let possible = is_installed("unshare")
        && Command::new("unshare")
            .args(["--map-root-user", "--net", "ip", "link", "set", "lo", "up"])
            .output()
            .is_ok_and(|output| output.status.success());
    if !possible {
        return None;
    }
    let program = env!("CARGO_BIN_EXE_millstream");
    let script = format!("{before} exec {program} {arguments}");
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "sh", "-c", &script]);
    Some(Running::start("isolated", &mut command).output_within(BOUND))
}

#[test]
fn networks_that_lead_nowhere() {
    let program = env!("CARGO_BIN_EXE_millstream");
    let small = format!(
        "ip link set lo mtu 300 up; \
         {program} rdma pingpong --bind 127.0.0.1 --wait 10s >/dev/null 2>&1 &"
    );
    let bench = format!("bench transfer --segment 10.0.0.1:5000 {BENCH}");
    let faults = [
        ("", "put --segment 10.0.0.1:5000 /proc/version", &["10.0.0.1", "unreachable"][..]),
        ("", &bench, &["10.0.0.1", "unreachable"]),
        ("", "get --segment 127.0.0.1:5000 /dev/null", &["127.0.0.1:5000", "is the interface up?"]),
        ("", "rdma write-bw 10.0.0.1", &["10.0.0.1", "is the interface up?", "unreachable"]),
        (
            "",
            "allreduce --controller 10.0.0.1:5000 --group g --world 2 --rank 0 --size 4 \
             --dtype int32 --op sum",
            &["10.0.0.1", "unreachable"],
        ),
        (
            &small,
            "rdma pingpong --wait 10s --bind 127.0.0.2 127.0.0.1",
            &["MTU of 300 bytes", "348"],
        ),
    ];
    for (before, arguments, words) in faults {
        let Some(output) = isolated(before, arguments) else {
            return skip("a network namespace cannot be made here");
        };
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        check(arguments, &output, 1, &words);
    }
}

#[test]
fn packet_sockets_without_the_capability() {
    if !is_installed("setpriv") {
        return skip("there is no setpriv");
    }
    let arguments = ["--bounding-set=-net_raw", "--inh-caps=-net_raw"];
    let mut command = Command::new("setpriv");
    command.args(arguments).arg(env!("CARGO_BIN_EXE_millstream"));
    command.args(["rdma", "write-bw", "--driver=packet", "--bind", &address()]);
    let output = Running::start("setpriv", &mut command).output_within(BOUND);
    if output.stderr.contains("setpriv") {
        return skip(&format!("setpriv cannot take the capability: {}", output.stderr.trim()));
    }
    let words = ["packet driver", "CAP_NET_RAW", "setcap", "udp driver"].map(str::to_owned);
    check("rdma write-bw --driver=packet", &output, 1, &words);
}
