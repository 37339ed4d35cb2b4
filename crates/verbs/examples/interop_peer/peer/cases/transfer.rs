//! Messages that arrive: every byte, every completion.

use anyhow::{Result, ensure};
use millstream_verbs::{
    Completion, CompletionOperation, CompletionStatus, Piece, SendOperation, SendRequest,
};

use crate::peer::Role;
use crate::peer::arena::letters;
use crate::peer::link::{DEPTH, Link, list};

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Send,
    SendImmediate(u32),
    Write,
    WriteImmediate(u32),
    Read,
}

/// One message, from a place in one side's source to the same place in the other's target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    pub(crate) kind: Kind,
    pub(crate) length: usize,
    pub(crate) offset: usize,
    /// Of the requester's own memory.
    pub(crate) local_pieces: usize,
    /// Of the receive request that a SEND goes to.
    pub(crate) receive_pieces: usize,
    pub(crate) signaled: bool,
    /// The request brings its bytes along.
    pub(crate) inline: bool,
}

impl Message {
    pub(crate) const fn new(kind: Kind, length: usize) -> Self {
        Self {
            kind,
            length,
            offset: 0,
            local_pieces: 1,
            receive_pieces: 1,
            signaled: true,
            inline: false,
        }
    }

    fn end(&self) -> usize {
        self.offset + self.length
    }

    /// What the receiver's completion is, if there is one.
    fn received_as(&self) -> Option<(CompletionOperation, Option<u32>)> {
        match self.kind {
            Kind::Send => Some((CompletionOperation::Receive, None)),
            Kind::SendImmediate(data) => Some((CompletionOperation::Receive, Some(data))),
            Kind::WriteImmediate(data) => Some((CompletionOperation::ReceiveWrite, Some(data))),
            Kind::Write | Kind::Read => None,
        }
    }

    fn completes_as(&self) -> CompletionOperation {
        match self.kind {
            Kind::Send | Kind::SendImmediate(_) => CompletionOperation::Send,
            Kind::Write | Kind::WriteImmediate(_) => CompletionOperation::Write,
            Kind::Read => CompletionOperation::Read,
        }
    }

    /// How the requester's memory is cut, as places relative to the message's.
    fn local_cuts(&self) -> Vec<(usize, usize)> {
        cuts(self.length, self.local_pieces)
    }

    fn receive_cuts(&self) -> Vec<(usize, usize)> {
        match self.kind {
            Kind::Send | Kind::SendImmediate(_) => cuts(self.length, self.receive_pieces),
            _ => cuts(self.length, 1),
        }
    }

    /// Puts what arrives into `target`, when the letters of `seed` are sent.
    fn apply(&self, seed: u8, target: &mut [u8]) {
        let read = self.kind == Kind::Read;
        let (from, to) = match read {
            true => (cuts(self.length, 1), self.local_cuts()),
            false => (self.local_cuts(), self.receive_cuts()),
        };
        let mut bytes =
            from.iter().flat_map(|&(start, length)| letters(seed, self.offset + start, length));
        for (start, length) in to {
            let start = self.offset + start;
            for byte in &mut target[start..start + length] {
                *byte = bytes.next().unwrap_or_default();
            }
        }
    }
}

/// Cuts a run of bytes into uneven pieces, last bytes first: a piece taken out of turn shows.
fn cuts(length: usize, count: usize) -> Vec<(usize, usize)> {
    let mut pieces = Vec::new();
    let mut end = length;
    for left in (2..=count).rev() {
        let piece = (end / left + 1).min(end);
        pieces.push((end - piece, piece));
        end -= piece;
    }
    pieces.push((0, end));
    pieces
}

/// Gives each message a place, with bytes between them that nothing may touch.
pub(crate) fn layout(messages: impl IntoIterator<Item = Message>) -> Vec<Message> {
    let mut offset = 0;
    let place = |message: Message| {
        let message = Message { offset, ..message };
        offset = message.end() + 13;
        message
    };
    messages.into_iter().map(place).collect()
}

/// Bytes that these messages need.
pub(crate) fn extent(messages: &[Message]) -> usize {
    messages.iter().map(Message::end).max().unwrap_or(0) + 1
}

/// `count` messages of all kinds, of up to `longest` bytes; the same ones for the same seed.
pub(crate) fn mixture(seed: u64, count: usize, longest: usize) -> Vec<Message> {
    let mut state = seed;
    let mut random = move |below: usize| {
        // Constants of Knuth's MMIX; the high bits are good enough for lengths.
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    layout((0..count).map(|index| {
        let kind = match random(5) {
            0 => Kind::Send,
            1 => Kind::SendImmediate(index as u32),
            2 => Kind::Write,
            3 => Kind::WriteImmediate(index as u32),
            _ => Kind::Read,
        };
        // Half of them are short.
        let below = if random(2) == 0 { 1500 } else { longest };
        let (local_pieces, receive_pieces) = (1 + random(4), 1 + random(4));
        let signaled = random(4) != 0;
        Message { local_pieces, receive_pieces, signaled, ..Message::new(kind, random(below)) }
    }))
}

/// The requester's messages. One that is longer than its device sends becomes several.
pub(crate) fn one_way(link: &mut Link<'_>, messages: &[Message]) -> Result<()> {
    let longest = link.max_message_length();
    let parts = |message: &Message| {
        let message = *message;
        (0..message.length.max(1)).step_by(longest).map(move |start| {
            let (offset, length) = (message.offset + start, (message.length - start).min(longest));
            Message { offset, length, ..message }
        })
    };
    let messages: Vec<Message> = messages.iter().flat_map(parts).collect();
    let messages = messages.as_slice();
    match link.role {
        Role::Requester => exchange(link, messages, &[]),
        Role::Responder => exchange(link, &[], messages),
    }
}

/// The same messages from each side, in halves of the memory: the requester's first.
pub(crate) fn both_ways(link: &mut Link<'_>, messages: &[Message]) -> Result<()> {
    let base = extent(messages);
    let second: Vec<Message> =
        messages.iter().map(|m| Message { offset: base + m.offset, ..*m }).collect();
    match link.role {
        Role::Requester => exchange(link, messages, &second),
        Role::Responder => exchange(link, &second, messages),
    }
}

/// Posts our messages, takes the peer's, and compares everything with what it should be.
fn exchange(link: &mut Link<'_>, ours: &[Message], theirs: &[Message]) -> Result<()> {
    let (our_seed, their_seed) = link.seeds();
    let mut target = link.arena.blank();
    for message in theirs.iter().filter(|message| message.kind != Kind::Read) {
        message.apply(their_seed, &mut target);
    }
    for message in ours.iter().filter(|message| message.kind == Kind::Read) {
        message.apply(their_seed, &mut target);
    }
    let receives: Vec<&Message> =
        theirs.iter().filter(|message| message.received_as().is_some()).collect();
    let mut posted_receives = 0;
    let post_receives = |link: &Link<'_>, posted: &mut usize, done: usize| {
        while *posted < receives.len() && *posted - done < DEPTH {
            link.post_receive(*posted as u64, receive_pieces(link, receives[*posted])?)?;
            *posted += 1;
        }
        anyhow::Ok(())
    };
    post_receives(link, &mut posted_receives, 0)?;
    link.control.meet("ready")?;

    // The last one has to say that all are done.
    let signaled = |index: usize| ours[index].signaled || index + 1 == ours.len();
    let (mut posted, mut completed, mut received) = (0, 0, 0);
    while completed < ours.len() || received < receives.len() {
        while posted < ours.len() && posted - completed < DEPTH {
            post(link, posted as u64, &ours[posted], signaled(posted))?;
            posted += 1;
        }
        let completion = link.completion()?;
        match completion.operation {
            CompletionOperation::Receive | CompletionOperation::ReceiveWrite => {
                ensure!(received < receives.len(), "a receive too many: {completion:?}");
                check_received(&completion, received, receives[received])?;
                received += 1;
                post_receives(link, &mut posted_receives, received)?;
            }
            _ => {
                let next = (completed..posted).find(|&index| signaled(index));
                ensure!(
                    next.is_some_and(|next| completion.id == next as u64),
                    "{completion:?}, where request {next:?} is next"
                );
                let index = completion.id as usize;
                check_completed(&completion, &ours[index])?;
                completed = index + 1;
            }
        }
    }
    link.control.meet("done")?;
    link.no_completion()?;
    link.arena.verify(our_seed, &target)
}

fn post(link: &Link<'_>, id: u64, message: &Message, signaled: bool) -> Result<()> {
    let operation = operation(link, message);
    if message.inline {
        let (seed, _) = link.seeds();
        // Gone once they are posted: whoever reads them later reads something else.
        let bytes: Vec<u8> = letters(seed, message.offset, message.length).collect();
        let request = SendRequest::new(id, operation, []);
        return link.post_send_inline(&SendRequest { signaled, ..request }, &bytes);
    }
    let pieces = local_pieces(link, message)?;
    link.post_send(SendRequest { signaled, ..SendRequest::new(id, operation, pieces) })
}

fn operation(link: &Link<'_>, message: &Message) -> SendOperation {
    let remote_key = link.remote.key;
    let remote_address = link.remote.target + message.offset as u64;
    match message.kind {
        Kind::Send => SendOperation::Send { immediate: None },
        Kind::SendImmediate(data) => SendOperation::Send { immediate: Some(data) },
        Kind::Write => SendOperation::Write { remote_address, remote_key, immediate: None },
        Kind::WriteImmediate(data) => {
            SendOperation::Write { remote_address, remote_key, immediate: Some(data) }
        }
        Kind::Read => {
            let remote_address = link.remote.source + message.offset as u64;
            SendOperation::Read { remote_address, remote_key }
        }
    }
}

fn local_pieces(link: &Link<'_>, message: &Message) -> Result<Vec<Piece>> {
    let start = match message.kind {
        Kind::Read => link.arena.target(message.offset),
        _ => link.arena.source(message.offset),
    };
    pieces(link, start, &message.local_cuts())
}

fn receive_pieces(link: &Link<'_>, message: &Message) -> Result<Vec<Piece>> {
    match message.kind {
        Kind::WriteImmediate(_) => Ok(vec![]),
        _ => pieces(link, link.arena.target(message.offset), &message.receive_cuts()),
    }
}

fn pieces(link: &Link<'_>, start: u64, cuts: &[(usize, usize)]) -> Result<Vec<Piece>> {
    let piece =
        |&(offset, length): &(usize, usize)| link.arena.piece(start + offset as u64, length);
    list(&cuts.iter().map(piece).collect::<Vec<Piece>>())
}

fn check_completed(completion: &Completion, message: &Message) -> Result<()> {
    ensure!(
        completion.status == CompletionStatus::Success
            && completion.operation == message.completes_as()
            && completion.length as usize == message.length,
        "{completion:?} of {message:?}"
    );
    Ok(())
}

fn check_received(completion: &Completion, id: usize, message: &Message) -> Result<()> {
    let (operation, immediate) = message.received_as().unwrap_or((CompletionOperation::Send, None));
    ensure!(
        completion.id == id as u64
            && completion.status == CompletionStatus::Success
            && completion.operation == operation
            && completion.immediate == immediate
            && completion.length as usize == message.length,
        "{completion:?} of receive {id}, {message:?}"
    );
    Ok(())
}
