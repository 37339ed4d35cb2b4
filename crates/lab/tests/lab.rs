//! Labs are built, changed and removed. What runs at a host is this program again, told by its
//! environment what to be.

use std::io::{BufRead, BufReader, Write};
use std::net::UdpSocket;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_lab::{Cut, Family, Handle, Lab, LabError, Link, Plan, Rate};

/// For anything that will happen, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);

const PART: &str = "MILLSTREAM_LAB_TEST_PART";

/// Builds a lab; `None`, and the test is skipped, where it cannot be had.
fn lab(plan: &Plan) -> Option<Lab> {
    match Lab::up(plan) {
        Ok(lab) => Some(lab),
        Err(LabError::Unavailable(reason)) => {
            skip(&reason);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn skip(reason: &str) {
    let required = std::env::var_os("MILLSTREAM_REQUIRE").is_some_and(|value| value == "all");
    assert!(!required, "cannot be skipped, as MILLSTREAM_REQUIRE=all: {reason}");
    println!("skipped: {reason}");
}

/// This program as a part of a test, to which lines are said, and which answers each.
struct Part {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Part {
    fn start(mut command: Command, part: &str) -> Self {
        command.args(["--exact", "part_of_another_test", "--nocapture"]).env(PART, part);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, stdin, stdout: BufReader::new(stdout) }
    }

    fn at(lab: &Handle, host: &str) -> Self {
        Self::start(lab.command(host, std::env::current_exe().unwrap()).unwrap(), "socket")
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.stdin, "{line}").unwrap();
        self.answer()
    }

    /// The next line that is one; the test harness prints others.
    fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "it has ended");
            if let Some((_, answer)) = line.split_once("part: ") {
                return answer.trim_end().to_owned();
            }
        }
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Does nothing unless another test has started this program for it.
#[test]
fn part_of_another_test() {
    match std::env::var(PART).as_deref() {
        Ok("socket") => be_a_socket(),
        Ok("owner") => be_an_owner(),
        _ => {}
    }
}

fn answer(text: impl std::fmt::Display) {
    println!("part: {text}");
}

/// `bind ADDRESS`, `send ADDRESS TEXT`, `flood ADDRESS BYTES`, `take` one datagram, or `drain BYTES`
/// and say in how many milliseconds.
fn be_a_socket() {
    let mut socket = None;
    let mut buffer = [0; 2048];
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        match (words[0], &socket) {
            ("bind", _) => {
                let bound = UdpSocket::bind((words[1], 0)).unwrap();
                answer(bound.local_addr().unwrap());
                socket = Some(bound);
            }
            ("send", Some(socket)) => match socket.send_to(words[2].as_bytes(), words[1]) {
                Ok(_) => answer("sent"),
                Err(error) => answer(error),
            },
            ("take", Some(socket)) => {
                let (length, _) = socket.recv_from(&mut buffer).unwrap();
                answer(String::from_utf8_lossy(&buffer[..length]));
            }
            ("flood", Some(socket)) => {
                // Until it is told to stop by its end: what the link drops is made up for.
                answer("begun");
                let socket: &UdpSocket = socket;
                loop {
                    let _ = socket.send_to(&[7; 1024], words[1]);
                }
            }
            ("drain", Some(socket)) => {
                // What was let through while nobody measured.
                let mut left = words[1].parse::<i64>().unwrap();
                let (length, _) = socket.recv_from(&mut buffer).unwrap();
                assert_eq!(length, 1024);
                let start = Instant::now();
                while left > 0 {
                    left -= socket.recv_from(&mut buffer).unwrap().0 as i64;
                }
                answer(start.elapsed().as_millis());
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Owns a lab with a process in it, and says where it all is.
fn be_an_owner() {
    let plan = Plan::new().hosts(["a", "b"]).links("a", "b", 1, &Link::default());
    let lab = match Lab::up(&plan) {
        Ok(lab) => lab,
        Err(error) => return answer(format!("error {error}")),
    };
    let mut sleeper = lab.command("b", "sleep").unwrap().arg("1000").spawn().unwrap();
    answer(format!("{} {} {}", sleeper.id(), lab.folder().display(), json(&lab)));
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(lab);
    let _ = sleeper.wait();
}

fn json(lab: &Handle) -> String {
    serde_json::to_string(lab).unwrap()
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn is_there(process: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn datagrams_cross_every_link_in_both_families() {
    let jumbo = Link { mtu: 9000, ..Link::default() };
    let plan = Plan::new().hosts(["a", "b", "c"]).switch("s").links("a", "b", 2, &jumbo);
    let Some(lab) = lab(&plan.links("*", "s", 1, &Link::default())) else { return };
    let (mut a, mut b) = (Part::at(&lab, "a"), Part::at(&lab, "b"));
    let mut c = Part::at(&lab, "c");
    let nics = |host: &str| lab.host(host).unwrap().nics.clone();
    for (here, there) in nics("a").iter().zip(nics("b")) {
        for (from, to) in here.addresses.iter().zip(there.addresses) {
            let (_, at) = (a.ask(&format!("bind {from}")), b.ask(&format!("bind {to}")));
            assert_eq!(a.ask(&format!("send {at} {from}")), "sent");
            assert_eq!(b.ask("take"), from.to_string());
        }
    }
    let at = c.ask(&format!("bind {}", lab.host("c").unwrap().nics[0].addresses[1]));
    assert_eq!(b.ask(&format!("send {at} hello")), "sent");
    assert_eq!(c.ask("take"), "hello");
    for (nic, mtu) in [("eth0", 9000), ("eth2", 1500)] {
        let shown = lab.command("a", "ip").unwrap().args(["link", "show", nic]).output().unwrap();
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.contains(&format!(" mtu {mtu} ")), "{shown}");
    }
}

#[test]
fn links_are_cut_and_restored() {
    let plan = Plan::new().hosts(["a", "b"]).links("a", "b", 2, &Link::default());
    let Some(mut lab) = lab(&plan) else { return };
    let (mut a, mut b) = (Part::at(&lab, "a"), Part::at(&lab, "b"));
    for family in 0..2 {
        let address = |host: &str| lab.host(host).unwrap().nics[1].addresses[family];
        let (from, to) = (address("a"), address("b"));
        a.ask(&format!("bind {from}"));
        let at = b.ask(&format!("bind {to}"));
        for (how, first) in [(Cut::Silent, "a"), (Cut::Silent, "b"), (Cut::Down, "b")] {
            lab.cut(first, "eth1", how).unwrap();
            assert_eq!(lab.is_cut("a", "eth1").unwrap(), Some(how));
            // Before a link was used its other end is looked for, and what waits for that is kept.
            if (how, first) == (Cut::Silent, "a") {
                lab.restore(first, "eth1").unwrap();
                assert_eq!(a.ask(&format!("send {at} first")), "sent");
                assert_eq!(b.ask("take"), "first");
                lab.cut(first, "eth1", how).unwrap();
            }
            if how == Cut::Silent {
                assert_eq!(a.ask(&format!("send {at} lost")), "sent");
            }
            lab.restore(first, "eth1").unwrap();
            // A link keeps the order: what was sent before would come before.
            assert_eq!(a.ask(&format!("send {at} kept")), "sent");
            assert_eq!(b.ask("take"), "kept");
        }
        lab.cut("a", "eth1", Cut::Down).unwrap();
        let said = a.ask(&format!("send {at} lost"));
        assert!(said.contains("unreachable"), "{said}");
        lab.restore("a", "eth1").unwrap();
        assert_eq!(a.ask(&format!("send {at} kept")), "sent");
        assert_eq!(b.ask("take"), "kept");
    }
}

/// Two hosts, and two routers between them: what the ends say crosses three links.
#[test]
fn hosts_reach_each_other_over_routers_also_after_a_cut() {
    let mut plan = Plan::new().hosts(["a", "r", "s", "b"]).router("r").router("s");
    let ends = |one: &'static str, at: &str, other: &'static str, to: &str| {
        [(one, at.parse().unwrap()), (other, to.parse().unwrap())]
    };
    for (a, r, s, b) in [
        ("192.0.2.1", "192.0.2.10", "192.0.2.20", "198.51.100.1"),
        ("2001:db8::1", "2001:db8::10", "2001:db8::20", "2001:db8:1::1"),
    ] {
        for ends in [ends("a", a, "r", r), ends("r", r, "s", s), ends("s", s, "b", b)] {
            plan = plan.routed_link(ends, &Link::default());
        }
    }
    let Some(mut lab) = lab(&plan) else { return };
    for nic in [0, 1] {
        let (mut a, mut b) = (Part::at(&lab, "a"), Part::at(&lab, "b"));
        let address = |lab: &Lab, host: &str| lab.host(host).unwrap().nics[nic].addresses[0];
        let (from, to) = (address(&lab, "a"), address(&lab, "b"));
        a.ask(&format!("bind {from}"));
        let at = b.ask(&format!("bind {to}"));
        assert_eq!(a.ask(&format!("send {at} before")), "sent");
        assert_eq!(b.ask("take"), "before");
        // Interfaces that go down lose their ways.
        for (host, link) in [("a", nic), ("r", 2 * nic + 1), ("s", 2 * nic)] {
            lab.cut(host, &format!("eth{link}"), Cut::Down).unwrap();
            lab.restore(host, &format!("eth{link}")).unwrap();
        }
        assert_eq!(a.ask(&format!("send {at} after")), "sent");
        assert_eq!(b.ask("take"), "after");
    }
}

#[test]
fn a_link_is_as_fast_as_its_rate() {
    let families = vec![Family::Ipv4];
    let link = Link { rate: Some(Rate::from_mbit(100)), families, ..Link::default() };
    let plan = Plan::new().hosts(["a", "b"]).links("a", "b", 1, &link);
    let Some(mut lab) = lab(&plan) else { return };
    lab.set_rate("b", "eth0", Some(Rate::from_mbit(8))).unwrap();
    assert_eq!(lab.rate("a", "eth0").unwrap(), Some(Rate::from_mbit(8)));
    let (mut a, mut b) = (Part::at(&lab, "a"), Part::at(&lab, "b"));
    a.ask("bind 10.77.0.1");
    let at = b.ask("bind 10.77.0.2");
    assert_eq!(a.ask(&format!("flood {at}")), "begun");
    // A megabyte takes a second, less what the bucket of tokens and the receiver's buffer hold.
    let took: u64 = b.ask("drain 1000000").parse().unwrap();
    assert!(took >= 600, "{took} ms");
}

/// An owner that was started, or why not.
fn owner(command: Command) -> Result<(Part, String, String, Handle), String> {
    let mut owner = Part::start(command, "owner");
    let said = owner.answer();
    if let Some(error) = said.strip_prefix("error ") {
        return Err(error.to_owned());
    }
    let mut words = said.splitn(3, ' ').map(str::to_owned);
    let (sleeper, folder) = (words.next().unwrap(), words.next().unwrap());
    let handle = serde_json::from_str(&words.next().unwrap()).unwrap();
    Ok((owner, sleeper, folder, handle))
}

fn check_that_nothing_is_left(sleeper: &str, folder: &str, handle: &Handle) {
    eventually("the process at a host ends", || !is_there(sleeper));
    eventually("the keeper ends", || !handle.is_up());
    assert!(!Path::new(folder).exists());
    let namespace = handle.command("b", "true").unwrap().stderr(Stdio::null()).status();
    assert!(!namespace.unwrap().success(), "the namespace is there");
}

#[test]
fn nothing_is_left_of_an_owner_that_was_killed() {
    let command = Command::new(std::env::current_exe().unwrap());
    let (mut owner, sleeper, folder, handle) = match owner(command) {
        Ok(owner) => owner,
        Err(reason) => return skip(&reason),
    };
    assert!(handle.is_up() && is_there(&sleeper) && Path::new(&folder).is_dir());
    owner.child.kill().unwrap();
    assert_eq!(owner.child.wait().unwrap().signal(), Some(9));
    check_that_nothing_is_left(&sleeper, &folder, &handle);
}

#[test]
fn users_have_labs_where_they_may_have_user_namespaces() {
    // Somebody who is nobody, without capabilities, when this is root.
    let folder = std::env::temp_dir().join(format!("millstream-lab-user-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    let copy = folder.join("test");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|id| id.stdout == b"0\n");
    let command = if is_root {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy);
        command.current_dir(&folder);
        command
    } else {
        Command::new(&copy)
    };
    let result = owner(command);
    std::fs::remove_dir_all(&folder).unwrap();
    let (owner, sleeper, folder, handle) = match result {
        Ok(owner) => owner,
        Err(reason) => return skip(&reason),
    };
    assert!(json(&handle).contains("\"user_namespace\":true"));
    assert!(is_there(&sleeper));
    drop(owner);
    check_that_nothing_is_left(&sleeper, &folder, &handle);
}

#[test]
fn names_that_are_not_there_are_told() {
    let plan = Plan::new().hosts(["a", "b"]).links("a", "b", 1, &Link::default());
    let Some(mut lab) = lab(&plan) else { return };
    let error = lab.command("c", "true").map(drop).unwrap_err();
    assert_eq!(error.to_string(), "there is no host c in this lab");
    let error = lab.cut("a", "eth1", Cut::Down).unwrap_err();
    assert_eq!(error.to_string(), "there is no NIC a:eth1 in this lab");
}

#[test]
fn the_plans_of_this_repository_are_good() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("plans");
    let mut links = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let plan: Plan = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        let Some(lab) = lab(&plan) else { return };
        let nics: usize = lab.layout().hosts.iter().map(|host| host.nics.len()).sum();
        links.push((path.file_stem().unwrap().to_string_lossy().into_owned(), nics));
    }
    links.sort();
    let links: Vec<_> = links.iter().map(|(name, nics)| (name.as_str(), *nics)).collect();
    let expected =
        [("four-links", 8), ("one-link", 2), ("switch", 9), ("two-links", 4), ("uneven-links", 8)];
    assert_eq!(links, expected);
}
