//! Where both engines find each other: each other, or a metadata server that runs as a process.

use std::fmt;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::peer::Kind;

/// How long a server may take until it accepts connections.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Store {
    PeerToPeer,
    /// The HTTP server that the original's wheel has.
    OriginalServer,
    OurServer,
    Etcd,
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::PeerToPeer => "P2PHANDSHAKE",
            Self::OriginalServer => "mooncake's server",
            Self::OurServer => "millstream's server",
            Self::Etcd => "etcd",
        })
    }
}

impl Store {
    pub(super) const ALL: [Self; 4] =
        [Self::PeerToPeer, Self::OriginalServer, Self::OurServer, Self::Etcd];

    /// Whether an initiator can go on with a target that was killed by the name that it had. The original takes no name
    /// again over HTTP: both servers refuse an `rpc_meta` that is there (`Duplicate rpc_meta key not allowed`). As an
    /// initiator it stays with the descriptor that it has seen first.
    pub(super) fn gives_names_again(self, initiator: Kind, target: Kind) -> bool {
        match self {
            // There, names are addresses, and the next one has another port.
            Self::PeerToPeer => false,
            _ if initiator == Kind::Original => false,
            Self::OriginalServer | Self::OurServer => target == Kind::Ours,
            Self::Etcd => true,
        }
    }
}

/// The programs of servers.
pub(super) struct Programs<'a> {
    pub(super) python: &'a Path,
    pub(super) millstream: &'a Path,
}

/// A store that engines can use. Dropping it ends its server.
pub(super) struct Running {
    /// As engines are given it.
    pub(super) uri: String,
    server: Option<Child>,
    folder: Option<PathBuf>,
}

impl Running {
    pub(super) fn start(store: Store, programs: &Programs<'_>) -> Result<Self> {
        let port = free_port()?;
        let mut folder = None;
        let (mut command, uri) = match store {
            Store::PeerToPeer => {
                let uri = "P2PHANDSHAKE".to_owned();
                return Ok(Self { uri, server: None, folder });
            }
            Store::OriginalServer => {
                let mut command = Command::new(programs.python);
                command.args(["-m", "mooncake.http_metadata_server", "--host", "127.0.0.1"]);
                command.args(["--port", &port.to_string()]);
                (command, format!("http://127.0.0.1:{port}/metadata"))
            }
            Store::OurServer => {
                let mut command = Command::new(programs.millstream);
                command.args(["metadata-server", "--listen", &format!("127.0.0.1:{port}")]);
                (command, format!("http://127.0.0.1:{port}/metadata"))
            }
            Store::Etcd => {
                let path = std::env::temp_dir().join(format!("millstream-mooncake-etcd-{port}"));
                let url = |port: u16| format!("http://127.0.0.1:{port}");
                let (clients, peers) = (url(port), url(free_port()?));
                let mut command = Command::new("etcd");
                command.arg("--data-dir").arg(&path);
                for option in ["--listen-client-urls", "--advertise-client-urls"] {
                    command.args([option, &clients]);
                }
                for option in ["--listen-peer-urls", "--initial-advertise-peer-urls"] {
                    command.args([option, &peers]);
                }
                command.args(["--initial-cluster", &format!("default={peers}")]);
                folder = Some(path);
                (command, format!("etcd://127.0.0.1:{port}"))
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let server = command.spawn().with_context(|| format!("cannot start {store}"))?;
        let mut running = Self { uri, server: Some(server), folder };
        running.wait_until_it_accepts(([127, 0, 0, 1], port).into(), store)?;
        Ok(running)
    }

    fn wait_until_it_accepts(&mut self, address: SocketAddr, store: Store) -> Result<()> {
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            if let Some(status) = self.server.as_mut().map(Child::try_wait).transpose()?.flatten() {
                bail!("{store} ended, {status}");
            }
            if begun.elapsed() > PATIENCE {
                bail!("{store} accepts no connection at {address}");
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
        if let Some(folder) = &self.folder {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// A port on which nobody listens, another one each time. It is below those that the kernel gives to connections, and
/// none that the original takes (15000 to 17000).
fn free_port() -> Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    const FIRST: u16 = 17_100;
    const COUNT: u16 = 10_000;
    let begin = (std::process::id() % u32::from(COUNT)) as u16;
    let mut ports = (0..COUNT).map(|_| {
        let next = u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        FIRST + ((u32::from(begin) + next) % u32::from(COUNT)) as u16
    });
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    ports.find(is_free).context("there is no free port for a server")
}
