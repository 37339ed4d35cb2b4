//! Who is to blame when a rank waits no longer.
//!
//! The rank says so to its switch, and this goes up to the root, with the number that the rank has given the collective:
//! of several trees, each counts its own collectives only, and above nobody may have announced it. The root asks the switches below it who of theirs
//! has not announced the collective, or not contributed what it may; they ask on, and answer when they have all
//! answers. Then the root ends the communicator, and says who it was.

use millstream_roce::{Piece, SendRequest};

use super::{CONTROL_BASE, Child, Communicator, Progress, Tag};
use crate::abort::{ABORT_BYTES, Abort, Overdue, Violation};
use crate::answer::Answer;
use crate::descriptor::DESCRIPTOR_BYTES;
use crate::slots::ChildSet;

/// A collective that somebody waits no longer for.
#[derive(Debug, Default)]
pub(super) struct Search {
    /// Which one. Who is awaited is looked for once in the life of a communicator; what is told above may come there when
    /// its result is on its way.
    sequence: Option<u64>,
    /// Its number among those of all trees, as whoever waits no longer has it.
    number: Option<u64>,
    /// The node above is to be told.
    tell: bool,
    /// Switches below that are to be asked.
    to_ask: ChildSet,
    /// Those that have not answered.
    asked: ChildSet,
    found: Option<Overdue>,
    /// The node above is to be answered.
    answer: bool,
}

impl Child {
    /// Whether it has not announced a collective, or not contributed what it may.
    fn lacks(&self, sequence: u64, window: u64) -> bool {
        let layout = &self.call.layout;
        let may = layout.end().min(self.posted + window);
        // A host says of segments in which it has no bytes when they are half a window, or the last before its next ones.
        let withheld = match layout.next_source_of(self.contributed, &self.ranks) > may {
            true => (window / 2).saturating_sub(1),
            false => 0,
        };
        self.announced <= sequence
            || self.announced == sequence + 1 && self.contributed + withheld < may
    }
}

impl Communicator {
    /// The collective that a note is about: the one to agree on next, or the one before.
    fn noted(&self, note: Answer, of: impl Fn(u64) -> Answer) -> Option<u64> {
        let agreed = self.agreed;
        [Some(agreed), agreed.checked_sub(1)].into_iter().flatten().find(|&it| of(it) == note)
    }

    /// A child waits no longer for a collective.
    pub(crate) fn gave_up(&mut self, child: usize, note: Answer) -> Result<Progress, Violation> {
        if self.has_ended_or_searches() {
            return Ok(Progress::None);
        }
        let of = &self.children[child];
        let sequence = self.noted(note, Answer::overdue).ok_or(Violation::Sequence)?;
        if !of.is_switch && of.announced <= sequence {
            // It does not wait for what it has not called.
            return Err(Violation::Sequence);
        }
        // A host that has announced it has announced nothing after it. Of a switch the latest may be another one.
        let is_latest = !of.is_switch && of.announced == sequence + 1;
        let number = is_latest.then_some(of.next_sequence.saturating_sub(1));
        Ok(self.gave_up_as(sequence, number))
    }

    /// A rank below a switch waits no longer for a collective, whose number it says.
    pub(crate) fn gave_up_below(
        &mut self,
        child: usize,
        buffer: usize,
        note: Answer,
    ) -> Result<Progress, Violation> {
        if self.has_ended_or_searches() {
            return Ok(Progress::None);
        }
        let start = self.receive_offset(child, buffer);
        let message = Abort::parse(&self.control[start..start + ABORT_BYTES]);
        let Some(Abort::Overdue(Overdue { sequence: number, count: 0, .. })) = message else {
            return Err(Violation::Immediate);
        };
        let sequence = self.noted(note, Answer::overdue).ok_or(Violation::Sequence)?;
        Ok(self.gave_up_as(sequence, Some(number)))
    }

    /// Whether nobody need be told any more that somebody waits no longer.
    const fn has_ended_or_searches(&self) -> bool {
        self.abort.is_some() || self.search.found.is_some()
    }

    fn gave_up_as(&mut self, sequence: u64, number: Option<u64>) -> Progress {
        // Above it is known, or the result is on its way.
        if self.search.sequence == Some(sequence) || self.is_told(sequence) {
            return Progress::None;
        }
        self.search.number = number;
        if self.uplink.is_none() {
            return self.search_below(sequence);
        }
        if let Some(number) = number {
            // The answer to the question from above comes to the same place later: who asks has heard enough. So does the number of a
            // later collective: should the note be sent again then, its result had come down all the same.
            self.write_note(&Overdue::new(number));
        }
        self.search.sequence = Some(sequence);
        self.search.tell = true;
        Progress::Ready
    }

    /// Whether everyone below has been sent all of a collective.
    fn is_told(&self, sequence: u64) -> bool {
        let end = self.call.layout.end();
        let has_all = |child: &Child| {
            child.agreed > sequence && child.posted >= end.min(child.call.layout.end())
        };
        self.children.iter().all(has_all)
    }

    /// The node above asks who is awaited here.
    pub(super) fn asked(&mut self, note: Answer) -> Progress {
        match self.noted(note, Answer::missing) {
            Some(sequence) if self.search.found.is_none() => self.search_below(sequence),
            _ => self.abort_above(),
        }
    }

    fn search_below(&mut self, sequence: u64) -> Progress {
        let mut found = Overdue::new(sequence);
        for (number, child) in self.children.iter().enumerate() {
            if child.is_switch {
                self.search.to_ask |= 1 << number;
            } else if child.lacks(sequence, self.window) {
                found.add(child.rank);
            }
        }
        self.search.sequence = Some(sequence);
        self.search.asked = self.search.to_ask;
        self.search.found = Some(found);
        self.conclude()
    }

    /// The number of a collective among those of all trees, of which this tree has counted its own.
    fn number(&self, sequence: u64) -> u64 {
        let has = |child: &&Child| child.announced > sequence;
        let announced = self.children.iter().filter(has).map(|child| child.next_sequence - 1).max();
        // Nobody here has announced it: it comes after the one before.
        let next = || self.children.iter().map(|child| child.next_sequence).max();
        announced.or_else(next).unwrap_or(sequence)
    }

    /// What a SEND of a child is that has a message with it: who is awaited below it, of which collective a rank
    /// below it waits no longer, or what a rank below it has called.
    pub(crate) fn note_below(&self, child: usize, immediate: u32, length: u32) -> Option<Answer> {
        let note = Answer::from_immediate(immediate).filter(|_| self.children[child].is_switch)?;
        let whole = match note {
            Answer::Missing(_) | Answer::Overdue(_) => ABORT_BYTES,
            Answer::Called(_) => DESCRIPTOR_BYTES,
            _ => return None,
        };
        (length as usize == whole).then_some(note)
    }

    /// A switch below has answered.
    pub(crate) fn found(&mut self, child: usize, buffer: usize) -> Result<Progress, Violation> {
        if self.abort.is_some() {
            return Ok(Progress::None);
        }
        let start = self.receive_offset(child, buffer);
        let message = Abort::parse(&self.control[start..start + ABORT_BYTES]);
        let (bit, below) = (1 << child, &self.children[child].ranks);
        let fits = |it: &Overdue| {
            u64::from(it.count) <= below.len()
                && it.named().iter().all(|&rank| below.contains(rank))
        };
        match (message, &mut self.search.found) {
            (Some(Abort::Overdue(other)), Some(found))
                if self.search.asked & bit != 0
                    && self.search.to_ask & bit == 0
                    && other.sequence == found.sequence
                    && fits(&other) =>
            {
                found.merge(&other);
            }
            _ => return Err(Violation::Immediate),
        }
        self.search.asked &= !bit;
        Ok(self.conclude())
    }

    fn conclude(&mut self) -> Progress {
        let Some(found) = self.search.found.filter(|_| self.search.asked == 0) else {
            return Progress::Ready;
        };
        if self.uplink.is_none() {
            let sequence = self.search.number.unwrap_or_else(|| self.number(found.sequence));
            return self.abort(Abort::Overdue(Overdue { sequence, ..found }));
        }
        self.write_note(&found);
        self.search.answer = true;
        Progress::Ready
    }

    /// Writes what goes up with a note.
    fn write_note(&mut self, note: &Overdue) {
        let start = self.note_start();
        self.control[start..start + ABORT_BYTES].copy_from_slice(&Abort::Overdue(*note).to_bytes());
    }

    /// What goes up with a note.
    fn note_piece(&self) -> Piece {
        let address = CONTROL_BASE + self.note_start() as u64;
        Piece { key: self.key, address, length: ABORT_BYTES as u32 }
    }

    /// What is to be said on a port about a collective that is overdue. There is room for it.
    pub(super) fn next_note(&mut self, port: usize) -> Option<SendRequest> {
        let sequence = self.search.sequence?;
        if !self.is_uplink(port) {
            let bit = 1 << port;
            if self.search.to_ask & bit == 0 {
                return None;
            }
            self.search.to_ask &= !bit;
            let note = Answer::missing(sequence).to_immediate();
            return Some(self.message(port, Tag::Probe, Some(note), Piece::default()));
        }
        if core::mem::take(&mut self.search.tell) {
            let note = Answer::overdue(sequence).to_immediate();
            let number = self.search.number.map(|_| self.note_piece());
            return Some(self.message(port, Tag::Up, Some(note), number.unwrap_or_default()));
        }
        if core::mem::take(&mut self.search.answer) {
            let note = Answer::missing(sequence).to_immediate();
            return Some(self.message(port, Tag::Up, Some(note), self.note_piece()));
        }
        None
    }
}
