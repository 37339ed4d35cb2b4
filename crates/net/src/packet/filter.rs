//! Programs that the kernel runs on each packet (classic BPF), so that only ours are copied to us.

use std::net::IpAddr;

use millstream_wire::ethernet::EthernetHeader;
use millstream_wire::ipv4::Ipv4Header;
use millstream_wire::ipv6::Ipv6Header;
use millstream_wire::udp;
use socket2::SockFilter;

use super::interface::{ETHERNET, LOOPBACK};

/// Takes all of a packet: longer ones do not exist.
const ALL: u32 = 1 << 18;

const PACKET_HOST: u32 = libc::PACKET_HOST as u32;

/// Takes nothing.
pub(super) fn nothing() -> [SockFilter; 1] {
    [take(0)]
}

/// Takes Ethernet frames for this machine that hold a UDP datagram, with something in it, for this
/// address and port.
///
/// What is for this machine, the kernel decided before: by the link address, and by the VLAN, if
/// there is a tag. A frame of a VLAN that has no interface here is nobody's.
pub(super) fn ours(address: IpAddr, port: u16) -> Vec<SockFilter> {
    let mut tests = vec![
        (ancillary(libc::SKF_AD_PKTTYPE), Test::Is(PACKET_HOST)),
        // Elsewhere the headers are not where this filter, and whoever reads the frame, looks.
        (ancillary(libc::SKF_AD_HATYPE), Test::IsOneOf(ETHERNET.into(), LOOPBACK.into())),
    ];
    tests.extend(packet_tests(EthernetHeader::LENGTH as u32, address, port));
    program(tests)
}

/// The tests of a packet whose IP header starts at `ip`.
fn packet_tests(ip: u32, address: IpAddr, port: u16) -> Vec<(SockFilter, Test)> {
    const PROTOCOL: u32 = udp::PROTOCOL as u32;
    /// Where the port and the length are in the UDP header, and what the length counts at least.
    const PORT: u32 = 2;
    const LENGTH: u32 = 4;
    const HEADER: u32 = udp::UdpHeader::LENGTH as u32;
    let word = |bytes: [u8; 4]| u32::from_be_bytes(bytes);
    let (mut tests, udp) = match address {
        IpAddr::V4(address) => {
            let tests = vec![
                (load(libc::BPF_B, ip), Test::Is(0x45)),
                (load(libc::BPF_B, ip + 9), Test::Is(PROTOCOL)),
                (load(libc::BPF_W, ip + 16), Test::Is(word(address.octets()))),
                // A later fragment has no UDP header. A first one is seen, refused, and counted.
                (load(libc::BPF_H, ip + 6), Test::HasNone(0x1fff)),
            ];
            (tests, ip + Ipv4Header::LENGTH as u32)
        }
        IpAddr::V6(address) => {
            // An extension header would be here; RoCEv2 has none.
            let mut tests = vec![(load(libc::BPF_B, ip + 6), Test::Is(PROTOCOL))];
            for (at, bytes) in (ip + 24..).step_by(4).zip(address.octets().as_chunks().0) {
                tests.push((load(libc::BPF_W, at), Test::Is(word(*bytes))));
            }
            (tests, ip + Ipv6Header::LENGTH as u32)
        }
    };
    tests.push((load(libc::BPF_H, udp + PORT), Test::Is(port.into())));
    // Empty datagrams are what asks for link addresses.
    tests.push((load(libc::BPF_H, udp + LENGTH), Test::Above(HEADER)));
    tests
}

/// What a loaded value must be.
#[derive(Clone, Copy)]
enum Test {
    Is(u32),
    IsOneOf(u32, u32),
    HasNone(u32),
    Above(u32),
}

/// Takes what passes all tests.
fn program(tests: Vec<(SockFilter, Test)>) -> Vec<SockFilter> {
    let jump = |condition: u32, value, then: usize, otherwise: usize| {
        // Some twenty instructions: every jump is short.
        let code = (libc::BPF_JMP | condition | libc::BPF_K) as u16;
        SockFilter::new(code, then as u8, otherwise as u8, value)
    };
    let mut reversed = vec![take(0), take(ALL)];
    for (load, test) in tests.into_iter().rev() {
        // So many instructions from the next one to that which takes nothing.
        let nothing = reversed.len() - 1;
        match test {
            Test::Is(value) => reversed.push(jump(libc::BPF_JEQ, value, 0, nothing)),
            Test::HasNone(bits) => reversed.push(jump(libc::BPF_JSET, bits, nothing, 0)),
            Test::Above(value) => reversed.push(jump(libc::BPF_JGT, value, 0, nothing)),
            Test::IsOneOf(one, other) => {
                reversed.push(jump(libc::BPF_JEQ, other, 0, nothing));
                reversed.push(jump(libc::BPF_JEQ, one, 1, 0));
            }
        }
        reversed.push(load);
    }
    reversed.reverse();
    reversed
}

fn take(bytes: u32) -> SockFilter {
    SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, bytes)
}

fn load(size: u32, at: u32) -> SockFilter {
    SockFilter::new((libc::BPF_LD | size | libc::BPF_ABS) as u16, 0, 0, at)
}

/// Something that is not in the packet.
fn ancillary(what: libc::c_int) -> SockFilter {
    load(libc::BPF_W, (libc::SKF_AD_OFF + what).cast_unsigned())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use socket2::{Domain, Socket, Type};

    use super::*;

    /// Whether the kernel's own interpreter lets a packet pass: on a pair of UNIX sockets, which
    /// anybody may make.
    struct Kernel(Socket, Socket);

    impl Kernel {
        fn with(address: IpAddr) -> Self {
            let (here, there) = Socket::pair(Domain::UNIX, Type::DGRAM, None).unwrap();
            there.attach_filter(&program(packet_tests(0, address, 4791))).unwrap();
            there.set_nonblocking(true).unwrap();
            here.set_nonblocking(true).unwrap();
            Self(here, there)
        }

        fn takes(&self, packet: &[u8]) -> bool {
            use std::io::Read;
            // A filtered packet is refused or silently dropped, by the age of the kernel.
            let _ = self.0.send(packet);
            let mut buffer = [0; 2048];
            (&self.1).read(&mut buffer).is_ok_and(|length| {
                assert_eq!(&buffer[..length], packet);
                true
            })
        }
    }

    fn v4() -> Vec<u8> {
        let mut packet = vec![0; 60];
        packet[0] = 0x45;
        packet[6] = 0x40;
        packet[9] = 17;
        packet[16..20].copy_from_slice(&[10, 1, 2, 3]);
        packet[22..24].copy_from_slice(&4791_u16.to_be_bytes());
        packet[25] = 40;
        packet
    }

    #[test]
    fn packets_to_our_address_and_port_pass() {
        let kernel = Kernel::with(Ipv4Addr::new(10, 1, 2, 3).into());
        assert!(kernel.takes(&v4()));
        for (byte, value, what) in [
            (0, 0x46, "options"),
            (0, 0x65, "another version"),
            (7, 1, "a later fragment"),
            (6, 0x5f, "a later fragment"),
            (9, 6, "TCP"),
            (16, 11, "another address"),
            (19, 4, "another address"),
            (22, 0x13, "another port"),
            (23, 0xb8, "another port"),
            (25, 8, "an empty datagram"),
        ] {
            let mut packet = v4();
            packet[byte] = value;
            assert!(!kernel.takes(&packet), "{what}");
        }
        let mut first_fragment = v4();
        first_fragment[6] = 0x20;
        assert!(kernel.takes(&first_fragment), "seen, to be counted");
        assert!(!kernel.takes(&v4()[..25]), "cut short");
    }

    #[test]
    fn packets_to_our_ipv6_address_and_port_pass() {
        let address = Ipv6Addr::new(0x2001, 0xdb8, 1, 2, 3, 4, 5, 6);
        let kernel = Kernel::with(address.into());
        let mut packet = vec![0; 100];
        packet[0] = 0x60;
        packet[6] = 17;
        packet[24..40].copy_from_slice(&address.octets());
        packet[42..44].copy_from_slice(&4791_u16.to_be_bytes());
        packet[45] = 40;
        assert!(kernel.takes(&packet));
        for byte in (24..40).chain([6, 42, 43]) {
            let mut packet = packet.clone();
            packet[byte] ^= 1;
            assert!(!kernel.takes(&packet), "byte {byte}");
        }
        packet[45] = 8;
        assert!(!kernel.takes(&packet), "an empty datagram");
    }
}
