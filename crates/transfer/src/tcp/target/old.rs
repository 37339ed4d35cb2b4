//! Requests in the framing of the original, one after the other.

use std::io;
use std::net::TcpStream;

use super::pace::Pace;
use super::{Input, Shared, nonsense, send_bytes, wait_for_room};
use crate::Opcode;
use crate::tcp::original::{REQUEST_LENGTH, Request, Status, Version};
use crate::tcp::pieces::{Piece, Pieces};

/// Does requests until the end of the connection, which comes after the first one that is refused.
pub(super) fn serve(mut input: Input<'_>, shared: &Shared, first: Request) -> io::Result<()> {
    let mut request = first;
    let mut pieces = Pieces::default();
    loop {
        if !do_one(&mut input, shared, request, &mut pieces)? {
            if request.version == Version::Two {
                input.linger();
            }
            // In version 1 the end of the connection is the answer: the sooner, the less is sent in vain.
            return Ok(());
        }
        input.rest();
        let Some(header) = input.header::<REQUEST_LENGTH>()? else { return Ok(()) };
        request = Request::parse(&header).ok_or_else(|| nonsense("what follows is no request"))?;
    }
}

/// Does a request; whether the connection goes on.
fn do_one(
    input: &mut Input<'_>,
    shared: &Shared,
    request: Request,
    pieces: &mut Pieces,
) -> io::Result<bool> {
    let Request { version, opcode, address, length } = request;
    let stream = input.stream();
    let memory = match length {
        0 => None,
        _ => shared.memory.find_offered(address, length).filter(|memory| !memory.is_gpu()),
    };
    let Some(memory) = memory else {
        return refuse(stream, version);
    };
    input.begun();
    pieces.clear(true);
    pieces.push(Piece { memory: Some(memory), address, length, fault: None });
    let status: &[u8] = if version == Version::Two { &Status::Done.emit() } else { &[] };
    match opcode {
        Opcode::Write => {
            input.receive(pieces)?;
            if pieces.faults().next().is_some() {
                return refuse(stream, version);
            }
            send_bytes(stream, status)?;
        }
        // If its memory goes meanwhile, the connection ends: there is no other way to say so.
        Opcode::Read => send_all(stream, pieces, status)?,
    }
    Ok(true)
}

fn refuse(stream: &TcpStream, version: Version) -> io::Result<bool> {
    if version == Version::Two {
        let bytes = Status::ADDRESS_REJECTED.emit();
        send_bytes(stream, &bytes)?;
    }
    Ok(false)
}

/// Sends bytes, and then what is left of the pieces.
fn send_all(stream: &TcpStream, pieces: &mut Pieces, mut before: &[u8]) -> io::Result<()> {
    let mut pace = Pace::new(pieces.left());
    while !before.is_empty() || pieces.left() > 0 {
        match pieces.send(stream, before, &[]) {
            Ok(sent) => {
                before = before.get(sent..).unwrap_or_default();
                pace.moved(sent);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait_for_room(stream, &pace)?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
