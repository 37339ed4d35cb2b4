//! Requests in the framing of the original, one after the other.

use std::io;

use super::pace::Pace;
use super::{Input, Output, Shared, nonsense};
use crate::Opcode;
use crate::tcp::original::{REQUEST_LENGTH, Request, Status, Version};
use crate::tcp::pieces::Pieces;

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
    let memory = match length {
        0 => None,
        _ => shared.memory.find_offered(address, length),
    };
    let Some(memory) = memory else {
        return refuse(input.output(), version);
    };
    input.begun(length);
    pieces.clear(true);
    pieces.push(Some(&memory), address, length);
    let status: &[u8] = if version == Version::Two { &Status::Done.emit() } else { &[] };
    match opcode {
        Opcode::Write => {
            input.receive(pieces)?;
            if pieces.faults().next().is_some() {
                return refuse(input.output(), version);
            }
            input.output().send(status)?;
        }
        // If its memory goes meanwhile, the connection ends: there is no other way to say so.
        Opcode::Read => send_all(input.output(), pieces, status)?,
    }
    Ok(true)
}

fn refuse(mut output: Output<'_>, version: Version) -> io::Result<bool> {
    if version == Version::Two {
        let bytes = Status::ADDRESS_REJECTED.emit();
        output.send(&bytes)?;
    }
    Ok(false)
}

/// Sends bytes, and then what is left of the pieces.
fn send_all(mut output: Output<'_>, pieces: &mut Pieces, mut before: &[u8]) -> io::Result<()> {
    let mut pace = Pace::later(pieces.left());
    while !before.is_empty() || pieces.left() > 0 {
        let sent = output.send_pieces(pieces, before, &[], &mut pace)?;
        before = before.get(sent..).unwrap_or_default();
    }
    output.finish(&mut pace)
}
