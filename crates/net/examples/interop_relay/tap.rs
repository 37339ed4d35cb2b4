//! A tap device: a network interface whose other end is a file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;

/// Makes the device and returns its other end; it goes away with the file.
pub(crate) fn open(name: &str) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: `ifreq` is integers and unions of such: all zeroes is a value of it.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is too long")));
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    // No offloads are asked for: packets come segmented and with their checksums.
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the descriptor is open, and TUNSETIFF reads an `ifreq` with a name and flags.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}
