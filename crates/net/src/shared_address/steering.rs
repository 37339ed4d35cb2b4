//! The sockets of an address: one for each slot, and a program by which the kernel chooses.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use millstream_roce::SLOTS;
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use crate::socket::{OpenError, bind, local};

/// The port may be in the hands of a process that is ending, or of one that only looks whether it is
/// free. Whoever stays longer means it.
const PATIENCE: Duration = Duration::from_millis(300);

/// Between attempts. Nothing tells when a port becomes free.
const PAUSE: Duration = Duration::from_millis(5);

/// Makes the sockets of all slots, in their order. None of them takes anything yet.
pub(super) fn make(asked: SocketAddr) -> Result<Vec<Socket>, OpenError> {
    let address = asked.ip();
    let failed = |operation| move |source| OpenError::System { address, operation, source };
    let mut sockets = Vec::with_capacity(SLOTS);
    let first = socket(asked).map_err(failed("socket"))?;
    // Exclusively: fails if anybody has the port, and be it one who shares it. Only then may others
    // join, so the places in the group are those of this order.
    bind_patiently(&first, asked)?;
    let local = local(&first, asked)?;
    first.set_reuse_port(true).map_err(failed("SO_REUSEPORT"))?;
    sockets.push(first);
    for _ in 1..SLOTS {
        let socket = socket(local).map_err(failed("socket"))?;
        socket.set_reuse_port(true).map_err(failed("SO_REUSEPORT"))?;
        bind(&socket, local)?;
        sockets.push(socket);
    }
    steer(&sockets[0]).map_err(failed("SO_ATTACH_REUSEPORT_CBPF"))?;
    Ok(sockets)
}

/// A socket that takes nothing: what comes for a slot that nobody has is dropped by the kernel, which
/// counts it with the socket (the last column of /proc/net/udp).
fn socket(local: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(local), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    if local.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    take_nothing(&socket)?;
    Ok(socket)
}

fn bind_patiently(socket: &Socket, asked: SocketAddr) -> Result<(), OpenError> {
    let end = Instant::now() + PATIENCE;
    loop {
        match bind(socket, asked) {
            Err(OpenError::PortInUse { .. }) if Instant::now() < end => thread::sleep(PAUSE),
            result => return result,
        }
    }
}

/// Lets the kernel choose the socket by the slot of the destination's queue pair number, as
/// [`millstream_roce::slot_of`] does. A program that reads behind the end of a packet returns 0.
pub(crate) fn steer(socket: &Socket) -> io::Result<()> {
    /// The first byte of the destination's number, in the BTH.
    const DESTINATION: u32 = 5;
    const SHIFT: u32 = 8 - SLOTS.trailing_zeros();
    let filter = |code: u32, value| SockFilter::new(code as u16, 0, 0, value);
    let program = [
        filter(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, DESTINATION),
        filter(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, SHIFT),
        // The accumulator.
        filter(libc::BPF_RET | 0x10, 0),
    ];
    let program = libc::sock_fprog {
        len: program.len() as libc::c_ushort,
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: the kernel copies the program, which is as long as it says and alive during the call;
    // a `SockFilter` is a `sock_filter`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const program).cast(),
            mem::size_of_val(&program) as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// From now on, the kernel drops what comes.
fn take_nothing(socket: &Socket) -> io::Result<()> {
    socket.attach_filter(&[SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)])
}

/// From now on, what comes can be received.
pub(super) fn take_all(socket: &Socket) -> io::Result<()> {
    socket.detach_filter()
}

/// Takes nothing any more, and forgets what has come.
pub(super) fn silence(socket: &Socket) -> io::Result<()> {
    /// Errors that wait are told once each.
    const MOST_ERRORS: usize = 1000;
    take_nothing(socket)?;
    let mut errors = 0;
    while errors < MOST_ERRORS {
        let mut nothing = [];
        match socket.recv(&mut nothing) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(_) => errors += 1,
        }
    }
    Ok(())
}
