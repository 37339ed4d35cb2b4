//! What a datagram says that it will write, before it is handled.

use std::cell::RefCell;

use millstream_roce::{
    AccessDenied, Destination, Endpoint, EndpointConfig, Memory, Node, Piece, ProtectionDomainId,
    RemoteAccess,
};
use millstream_wire::{Bth, ExtendedHeaders, Opcode, Packet, Psn, Qpn, Reth};

/// Notes what it is to expect.
#[derive(Debug, Default)]
struct Notes(RefCell<Vec<(u32, u64, u64)>>);

impl Memory for Notes {
    fn expect(&self, key: u32, address: u64, length: u64) {
        self.0.borrow_mut().push((key, address, length));
    }

    fn authorize(&mut self, _access: &RemoteAccess) -> Result<(), AccessDenied> {
        unreachable!("nothing is handled")
    }

    fn write(&mut self, _to: &Destination, _payload: &[u8]) -> Result<(), AccessDenied> {
        unreachable!("nothing is handled")
    }

    fn bytes(&self, _piece: &Piece) -> Result<&[u8], AccessDenied> {
        unreachable!("nothing is handled")
    }

    fn check_local(
        &self,
        _domain: ProtectionDomainId,
        _piece: &Piece,
        _write: bool,
    ) -> Result<(), AccessDenied> {
        unreachable!("nothing is handled")
    }
}

fn datagram(opcode: Opcode, dma_length: u32, payload: &[u8]) -> Vec<u8> {
    let reth = Reth { virtual_address: 0x1234_5678_9abc, remote_key: 77, dma_length };
    let extended =
        ExtendedHeaders { reth: opcode.has_reth().then_some(reth), ..ExtendedHeaders::default() };
    let bth = Bth::new(opcode as u8, Qpn::new(3), Psn::new(4));
    let packet = Packet { bth, opcode, extended, payload, padding: &[], icrc: 0 };
    let mut bytes = vec![0; 100 + payload.len()];
    let length = packet.emit(&mut bytes);
    bytes.truncate(length);
    bytes
}

#[test]
fn what_a_write_names_is_expected_and_nothing_else() {
    let memory = Notes::default();
    let endpoint =
        Endpoint::new(EndpointConfig::new(std::net::Ipv4Addr::LOCALHOST.into(), 1), memory);
    let place = |length| vec![(77, 0x1234_5678_9abc, length)];
    for (opcode, dma_length, expected) in [
        // The 4 bytes of the ICRC may be taken for payload, of which the message has no more.
        (Opcode::RcWriteOnly, 64, place(64)),
        (Opcode::RcWriteFirst, 5000, place(68)),
        (Opcode::RcWriteOnly, 0, place(0)),
        (Opcode::RcReadRequest, 64, vec![]),
        (Opcode::RcWriteMiddle, 64, vec![]),
        (Opcode::RcSendOnly, 64, vec![]),
    ] {
        let payload: &[u8] = if opcode == Opcode::RcReadRequest { &[] } else { &[1; 64] };
        endpoint.expect(&datagram(opcode, dma_length, payload));
        assert_eq!(endpoint.memory().0.take(), expected, "{opcode:?}");
    }
    let write = datagram(Opcode::RcWriteOnly, 64, &[1; 64]);
    for length in 0..28 {
        endpoint.expect(&write[..length]);
    }
    endpoint.expect(&[0xff; 100]);
    assert_eq!(endpoint.memory().0.take(), []);
}
