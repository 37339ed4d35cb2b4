//! Two network namespaces with a wire between them, that go away with their threads.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::skip;

type Job = Box<dyn FnOnce() + Send>;

/// Between fork and exec a child has all sockets of the process, of which this test or another has
/// perhaps just closed one: then its port is in use. Who opens a port for the second time holds
/// this meanwhile.
static SPAWNING: Mutex<()> = Mutex::new(());

/// Does something while no child is between fork and exec.
pub(crate) fn while_nothing_spawns<T>(work: impl FnOnce() -> T) -> T {
    let _guard = SPAWNING.lock().unwrap_or_else(PoisonError::into_inner);
    work()
}

/// A thread in a network namespace of its own. What it opens and starts is there, too.
pub(crate) struct Namespace {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Names the namespace for `ip`.
    path: String,
}

impl Namespace {
    fn new() -> io::Result<Self> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (made, is_made) = mpsc::channel();
        let thread = thread::spawn(move || {
            // SAFETY: no pointers; concerns only this thread.
            let result = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            // SAFETY: no pointers.
            let id = unsafe { libc::gettid() };
            let made_it = if result == 0 { Ok(id) } else { Err(io::Error::last_os_error()) };
            made.send(made_it).expect("somebody waits");
            queue.into_iter().for_each(|job| job());
        });
        let id = is_made.recv().expect("it says so either way")?;
        let path = format!("/proc/{}/task/{id}/ns/net", std::process::id());
        Ok(Self { jobs: Some(jobs), thread: Some(thread), path })
    }

    /// Runs `work` there.
    pub(crate) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, is_done) = mpsc::channel();
        let job = Box::new(move || done.send(work()).expect("somebody waits"));
        self.jobs.as_ref().expect("until it is dropped").send(job).expect("it waits for jobs");
        is_done.recv().expect("the work panicked")
    }

    /// Runs `ip` there.
    pub(crate) fn ip(&self, arguments: &str) {
        let arguments: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
        self.run(move || {
            let mut ip = Command::new("ip");
            ip.args(&arguments).stdout(Stdio::null()).stderr(Stdio::piped());
            let child = while_nothing_spawns(|| ip.spawn()).expect("ip runs");
            let output = child.wait_with_output().expect("ip ends");
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "ip {arguments:?}: {error}");
        });
    }
}

/// Makes the kernel complete the checksums of what leaves by `wire`, and segment it, as for an
/// interface that can do neither.
fn disable_offload() {
    /// From the kernel's `ethtool.h` and `sockios.h`.
    const ETHTOOL_STXCSUM: u32 = 0x17;
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let mut value = [ETHTOOL_STXCSUM, 0];
    // SAFETY: plain old data, of which zeros are a valid value; the request takes a name and a
    // pointer to two words, which live during the call.
    let result = unsafe {
        let mut about: libc::ifreq = std::mem::zeroed();
        for (to, from) in about.ifr_name.iter_mut().zip(b"wire") {
            *to = *from as libc::c_char;
        }
        about.ifr_ifru.ifru_data = value.as_mut_ptr().cast();
        libc::ioctl(std::os::fd::AsRawFd::as_raw_fd(&socket), SIOCETHTOOL as _, &raw mut about)
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Two hosts, `here` with 10.99.0.1/24 and fd99::1/64, and `there` with .2 and ::2, on a wire: an
/// interface named `wire` at both ends.
pub(crate) struct Lab {
    pub(crate) here: Namespace,
    pub(crate) there: Namespace,
}

/// Link addresses of `wire`.
pub(crate) const LINK_HERE: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(crate) const LINK_THERE: [u8; 6] = [2, 0, 0, 0, 0, 2];

pub(crate) const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 99, 0, 1));
pub(crate) const THERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 99, 0, 2));
pub(crate) const HERE_V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 1));
pub(crate) const THERE_V6: IpAddr =
    IpAddr::V6(std::net::Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 2));

impl Lab {
    /// Makes it, with this MTU. `None`, and the test is skipped, where it cannot be had.
    pub(crate) fn new(test: &str, mtu: usize) -> Option<Self> {
        if while_nothing_spawns(|| Command::new("ip").arg("-V").output()).is_err() {
            skip(test, "ip (iproute2)");
            return None;
        }
        let namespaces = Namespace::new().and_then(|here| Ok((here, Namespace::new()?)));
        let (here, there) = match namespaces {
            Ok(both) => both,
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                skip(test, "network namespaces of its own, which only root may make");
                return None;
            }
            Err(error) => panic!("no network namespace: {error}"),
        };
        let peer = &there.path;
        here.ip(&format!(
            "link add wire mtu {mtu} address 02:00:00:00:00:01 type veth \
             peer name wire mtu {mtu} address 02:00:00:00:00:02 netns {peer}"
        ));
        for (host, number) in [(&here, 1), (&there, 2)] {
            host.run(|| {
                // Addresses are unique here, and nobody has the time to find out.
                fs::write("/proc/sys/net/ipv6/conf/wire/accept_dad", "0").ok();
            });
            host.ip(&format!("address add 10.99.0.{number}/24 dev wire"));
            host.ip(&format!("address add fd99::{number}/64 dev wire nodad"));
            host.ip("link set lo up");
            host.ip("link set wire up");
        }
        Some(Self { here, there })
    }

    /// What crosses the wire is as it would be on a real one: segmented, with all its checksums.
    pub(crate) fn as_on_copper(&self) {
        for place in [&self.here, &self.there] {
            place.run(disable_offload);
        }
    }
}
