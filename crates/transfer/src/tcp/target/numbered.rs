//! Numbered messages of another engine of this project.

use std::io;

use super::pace::Pace;
use super::{Input, Output, Shared, forwarding, nonsense};
use crate::Opcode;
use crate::tcp::message::{
    Answer, CHECKED, Fault, Header, Hello, PLAIN, Piece as Named, Purpose, Welcome, add_up,
};
use crate::tcp::original::REQUEST_LENGTH;
use crate::tcp::pieces::Pieces;

/// Does messages until the end of the connection.
pub(super) fn serve(
    mut input: Input<'_>,
    shared: &Shared,
    first: &[u8; REQUEST_LENGTH],
) -> io::Result<()> {
    let rest = input.bytes::<{ Hello::LENGTH - REQUEST_LENGTH }>()?;
    let mut whole = [0; Hello::LENGTH];
    whole[..REQUEST_LENGTH].copy_from_slice(first);
    whole[REQUEST_LENGTH..].copy_from_slice(&rest);
    let hello = Hello::parse(&whole).ok_or_else(|| nonsense("it does not say hello"))?;
    if hello.version == CHECKED && !input.is_tls() {
        input.check();
    }
    let registered = shared.registry.enter(hello.connection, input.stream())?;
    let is_ours = hello.incarnation == shared.incarnation;
    // Another number may be that of a way to somebody else.
    let relay = shared.relay.get().filter(|_| !is_ours);
    let passage = relay.map(|relay| relay.enter(hello.incarnation));
    let welcome = match (&registered, &passage) {
        _ if ![PLAIN, CHECKED].contains(&hello.version) => Welcome::OtherVersion,
        (_, None) if !is_ours => Welcome::OtherIncarnation,
        (_, Some(Err(welcome))) => *welcome,
        (None, _) => Welcome::Fenced,
        (Some(_), _) => Welcome::Taken,
    };
    input.output().send(&welcome.emit())?;
    let registered = match registered {
        Some(registered) if welcome == Welcome::Taken => registered,
        _ => {
            input.linger();
            return Ok(());
        }
    };
    input.begun(0);
    if let Some(Ok(passage)) = passage {
        return forwarding::serve(input, shared, hello.connection, &passage, &registered);
    }
    let (mut pieces, mut answer, mut end) = (Pieces::default(), Vec::new(), Vec::new());
    loop {
        input.rest();
        let Some(header) = input.header::<{ Header::LENGTH }>()? else { return Ok(()) };
        let header = Header::parse(&header).ok_or_else(|| nonsense("no message begins so"))?;
        let id = header.id;
        answer.clear();
        end.clear();
        pieces.clear(false);
        match header.purpose {
            Purpose::Fence => answer_fence(&mut input, shared, hello.connection, id, &mut answer)?,
            Purpose::Move(opcode) => {
                read_pieces(&mut input, shared, &header, &mut pieces)?;
                input.begun(header.length);
                match opcode {
                    Opcode::Write => {
                        pieces.prefetch_room();
                        input.receive(&mut pieces)?;
                        say_ended(id, &pieces, &mut answer);
                        input.output().send(&answer)?;
                    }
                    Opcode::Read => {
                        pieces.prefetch();
                        answer_read(input.output(), id, &mut pieces, &mut answer, &mut end)?;
                    }
                }
            }
        }
    }
}

/// Ends another connection than this, and answers whether nothing of it is done any more.
pub(super) fn answer_fence(
    input: &mut Input<'_>,
    shared: &Shared,
    own: u128,
    id: u64,
    answer: &mut Vec<u8>,
) -> io::Result<()> {
    let connection = Named::parse(&input.bytes()?).number();
    input.begun(0);
    let ended = connection != own && shared.registry.fence(connection);
    answer.extend_from_slice(&Answer::Ended { id, faults: u32::from(!ended) }.emit());
    if !ended {
        answer.extend_from_slice(&Fault::NotFenced.emit(0));
    }
    input.output().send(answer)
}

fn read_pieces(
    input: &mut Input<'_>,
    shared: &Shared,
    header: &Header,
    pieces: &mut Pieces,
) -> io::Result<()> {
    for _ in 0..header.pieces {
        let Named { address, length } = Named::parse(&input.bytes()?);
        if length > header.length {
            return Err(nonsense("a piece is longer than its message"));
        }
        // Several often lie in the same.
        let last = pieces.last_memory();
        if last.is_some_and(|last| last.contains(address, length) && !last.is_closed()) {
            pieces.push_same(address, length);
        } else {
            pieces.push(shared.memory.find_offered(address, length).as_ref(), address, length);
        }
    }
    match add_up(pieces.list().iter().map(|piece| piece.length), header.length) {
        true => Ok(()),
        false => Err(nonsense("the pieces of a message are not as long as it says")),
    }
}

pub(super) fn say_ended(id: u64, pieces: &Pieces, answer: &mut Vec<u8>) {
    let faults = pieces.faults().count() as u32;
    answer.extend_from_slice(&Answer::Ended { id, faults }.emit());
    pieces.faults().for_each(|(index, fault)| answer.extend_from_slice(&fault.emit(index)));
}

pub(super) fn answer_read(
    mut output: Output<'_>,
    id: u64,
    pieces: &mut Pieces,
    answer: &mut Vec<u8>,
    end: &mut Vec<u8>,
) -> io::Result<()> {
    let faults = pieces.faults().count() as u32;
    pieces.skip_faulty();
    if pieces.left() == 0 {
        say_ended(id, pieces, end);
        return output.send(end);
    }
    answer.extend_from_slice(&Answer::Data { id, faults, length: pieces.left() }.emit());
    pieces.faults().for_each(|(index, fault)| answer.extend_from_slice(&fault.emit(index)));
    // What comes last goes with the data, unless there is something to say.
    end.extend_from_slice(&Answer::Ended { id, faults: 0 }.emit());
    let mut left = &end[..];
    let mut before = &answer[..];
    let mut pace = Pace::later(pieces.left());
    while pieces.left() > 0 || !before.is_empty() {
        let intact = pieces.faults().count() as u32 == faults;
        let data = pieces.left() + before.len() as u64;
        let after = if intact { left } else { &[] };
        let sent = output.send_pieces(pieces, before, after, &mut pace)?;
        before = before.get(sent..).unwrap_or_default();
        left = &left[(sent as u64).saturating_sub(data) as usize..];
    }
    if left.len() == end.len() && pieces.faults().count() as u32 != faults {
        // Zeros were sent for some.
        let mut late = Vec::new();
        say_ended(id, pieces, &mut late);
        return output.send(&late);
    }
    output.send(left)
}
