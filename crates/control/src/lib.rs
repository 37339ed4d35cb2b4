//! The daemons: [`controller`] and [`switch`] of in-network collectives, and [`metadata_server`]; and
//! [`status_server`], by which others look at a process: [`api`] is what a controller shows there,
//! [`switch_pages`] what a switch does.
//!
//! Each is one function that runs until it is told to stop, on the thread that calls it. What it
//! decides is in the state machines of `millstream_inc`; here are sockets, clocks and signals.

pub mod api;
pub mod controller;
mod data_plane;
mod http;
mod leadership;
pub mod metadata_server;
mod plans;
mod prometheus;
mod reader;
mod reader_tokens;
mod shutdown;
pub mod state;
pub mod status_server;
pub mod switch;
pub mod switch_pages;
mod tls;
pub mod tokens;
pub mod topology_file;

use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use millstream_inc::controller::IdentitySecret;
use millstream_net::token::draw_nonce;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

pub use shutdown::{Shutdown, shutdown, terminated};

/// Runs a daemon on a runtime of its own, on this thread.
fn block_on<F: Future>(future: F) -> io::Result<F::Output> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(future))
}

/// What to do where a daemon cannot listen.
fn listen_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => ": `ip address` shows the addresses of this machine",
        io::ErrorKind::AddrInUse => ": another process does, perhaps another one like this",
        io::ErrorKind::PermissionDenied => ": ports below 1024 need privileges",
        _ => "",
    }
}

/// Whether a future is over already. To be asked before a daemon says that it is ready: a future
/// that waits for signals watches for them from here on.
async fn is_over(future: Pin<&mut impl Future<Output = ()>>) -> bool {
    tokio::select! {
        biased;
        () = future => true,
        () = std::future::ready(()) => false,
    }
}

/// The connection of a switch and a controller: whoever is cut off for this long connects again.
const CUT_OFF: Duration = Duration::from_secs(8);

/// Has small messages sent at once, and the kernel notice that the other machine is not there any more, which says
/// nothing of a process that stands still.
fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(CUT_OFF / 2)
            .with_interval(Duration::from_secs(1))
            .with_retries(4),
    )?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(CUT_OFF))?;
    Ok(())
}

/// What nobody else knows. Where the system gives none, what the maps of this process are keyed with.
fn secret() -> IdentitySecret {
    let drawn = draw_nonce().unwrap_or_else(|_| {
        let mut bits = [0; 32];
        bits.chunks_exact_mut(8).for_each(|part| part.copy_from_slice(&seed().to_be_bytes()));
        bits
    });
    IdentitySecret::new(drawn)
}

/// A number that another start of the same daemon does not get.
fn seed() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // RandomState takes its keys from the operating system.
    RandomState::new().hash_one(since_epoch)
}
