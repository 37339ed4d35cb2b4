//! Addresses of hosts by name, from the system's resolver.

use std::ffi::{CStr, CString};
use std::io;
use std::net::SocketAddr;
use std::ptr;

use crate::address::socket_address;
use crate::forks::looking_up;

/// The addresses of a host, with port 0. Blocks for as long as the resolver does.
///
/// The standard library's lookup has what the resolver said as text only, which depends on the program's locale. Here
/// [`io::ErrorKind::NotFound`] says that there is no such host, or none with an address; all else, that it is not known.
pub fn lookup(host: &str) -> io::Result<Vec<SocketAddr>> {
    let name = CString::new(host).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: zeros are a valid value.
    let mut hints: libc::addrinfo = unsafe { std::mem::zeroed() };
    // One for each address, in place of one for each kind of socket.
    hints.ai_socktype = libc::SOCK_STREAM;
    let mut list = ptr::null_mut();
    let asked = (name.as_ptr(), &raw const hints, &raw mut list);
    // SAFETY: all are alive during the call.
    let code = looking_up(|| unsafe { libc::getaddrinfo(asked.0, ptr::null(), asked.1, asked.2) });
    if code != 0 {
        return Err(error(code, io::Error::last_os_error()));
    }
    let mut addresses = Vec::new();
    let mut next = list;
    // SAFETY: null, or an entry of the list, which was not freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        // SAFETY: the address is as long as its family says.
        addresses.extend(unsafe { socket_address(entry.ai_addr) });
        next = entry.ai_next;
    }
    // SAFETY: it came from `getaddrinfo`, and nothing of it is used any more.
    unsafe { libc::freeaddrinfo(list) };
    Ok(addresses)
}

/// What a code of `getaddrinfo` means (RFC 3493, 6.1).
fn error(code: libc::c_int, system: io::Error) -> io::Error {
    if code == libc::EAI_SYSTEM {
        // A file that is not there says nothing of the host.
        return match system.kind() {
            io::ErrorKind::NotFound => io::Error::other(system),
            _ => system,
        };
    }
    let kind = match code {
        libc::EAI_NONAME | libc::EAI_NODATA => io::ErrorKind::NotFound,
        _ => io::ErrorKind::Other,
    };
    // SAFETY: a text that ends with a zero, for any code, and is never freed.
    let text = unsafe { CStr::from_ptr(libc::gai_strerror(code)) }.to_string_lossy();
    io::Error::new(kind, format!("failed to lookup address information: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_have_addresses() {
        for host in ["localhost", "127.0.0.1", "::1"] {
            let found = lookup(host).unwrap();
            assert!(found.iter().all(|address| address.ip().is_loopback()), "{host}: {found:?}");
            assert!(!found.is_empty(), "{host}");
        }
        assert_eq!(lookup("a\0b").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    /// By its code, whatever its text is in the program's locale.
    #[test]
    fn only_a_host_that_is_known_not_to_be_there_is_not_found() {
        let kind = |code| error(code, io::Error::from(io::ErrorKind::OutOfMemory)).kind();
        assert_eq!(kind(libc::EAI_NONAME), io::ErrorKind::NotFound);
        assert_eq!(kind(libc::EAI_NODATA), io::ErrorKind::NotFound);
        let no_file = error(libc::EAI_SYSTEM, io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(no_file.kind(), io::ErrorKind::Other);
        for code in [libc::EAI_AGAIN, libc::EAI_FAIL, libc::EAI_MEMORY, libc::EAI_FAMILY] {
            assert_eq!(kind(code), io::ErrorKind::Other);
        }
        assert_eq!(kind(libc::EAI_SYSTEM), io::ErrorKind::OutOfMemory);
    }
}
