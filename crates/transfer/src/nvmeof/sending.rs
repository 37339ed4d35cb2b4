//! Sending to a target, from memory that may be unregistered meanwhile.

use std::io;
use std::time::Duration;

use millstream_net::stream::Readiness;

use super::flow::Part;
use super::protocol::{EFAULT, Request};
use super::wire::Wire;
use crate::gpu::STAGED;
use crate::memory::Inside;

/// How often who waits for a stream looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(200);

/// Sent for what is not there any more, in a WRITE that does not count.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Sends all of these bytes, and what the wire has of others.
pub(super) fn send_all(wire: &Wire, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let sent = or_wait(wire, wire.send(bytes))?;
        bytes = &bytes[sent..];
    }
    while or_wait(wire, wire.flush().map(|()| 1))? == 0 {}
    Ok(())
}

/// What was sent; nothing, after a wait, where there was no room.
fn or_wait(wire: &Wire, sent: io::Result<usize>) -> io::Result<usize> {
    match sent {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            wire.wait(Readiness::Writable, LOOK)?;
            Ok(0)
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        sent => sent,
    }
}

/// Bytes of a WRITE that were copied from memory of a GPU, which sockets do not take, with what is before and after them.
#[derive(Default)]
pub(super) struct Staged {
    bytes: Vec<u8>,
    /// How many bytes of what is sent are before these.
    start: usize,
}

impl Staged {
    /// What is to be sent once so many bytes were sent.
    fn after(&self, sent: usize) -> &[u8] {
        let offset = sent.checked_sub(self.start);
        offset.and_then(|offset| self.bytes.get(offset..)).unwrap_or_default()
    }

    /// Has `before`, bytes of the memory, and `after` where these are the last ones; whether they could be copied.
    fn fill(
        &mut self,
        sent: usize,
        inside: &Inside<'_>,
        before: &[u8],
        (address, length): (u64, usize),
        after: &[u8],
    ) -> bool {
        self.start = sent;
        let head = before.len();
        self.bytes.resize(head + length.min(STAGED), 0);
        self.bytes[..head].copy_from_slice(before);
        if !inside.copy_out(address, &mut self.bytes[head..]) {
            self.bytes.clear();
            return false;
        }
        if length <= STAGED {
            self.bytes.extend_from_slice(after);
        }
        true
    }

    /// Leaves out what is behind so many bytes of what is sent.
    fn end_at(&mut self, end: usize) {
        self.bytes.truncate(end.saturating_sub(self.start));
    }
}

/// Sends a WRITE, behind what else is in `headers`; `false` when its memory is not registered any more
/// and nothing was sent. If that is so later, the target is told that the WRITE does not count; and also if
/// it is not `wanted` any more, which is asked while there is no room. Its memory is not touched after that, even
/// where the rest of the WRITE never finds room. The wire may have the end of it still: [`send_all`] sends that.
pub(super) fn send_write(
    wire: &Wire,
    (headers, part): (&[u8], &Part),
    staged: &mut Staged,
    wanted: impl Fn() -> bool,
) -> io::Result<bool> {
    staged.bytes.clear();
    let data_end = headers.len() + part.length as usize;
    let mut counts = true;
    let mut sent = 0;
    while sent < data_end + Request::end(true).len() {
        if sent == 0 && !counts {
            return Ok(false);
        }
        let end = Request::end(counts);
        let before = headers.get(sent..).unwrap_or_default();
        let after = &end[sent.saturating_sub(data_end)..];
        let done = sent.saturating_sub(headers.len()).min(part.length as usize);
        let left = part.length as usize - done;
        let result = match part.local.enter() {
            _ if !staged.after(sent).is_empty() => wire.send(staged.after(sent)),
            _ if left == 0 => wire.send(after),
            Some(inside) if counts && inside.gpu().is_some() => {
                let data = (part.address + done as u64, left);
                counts = staged.fill(sent, &inside, before, data, after);
                continue;
            }
            Some(inside) if counts => {
                let data = (part.address + done as u64, left as u64);
                match wire.send_memory(&inside, before, data, after) {
                    // Somebody has unmapped it.
                    Err(error) if error.raw_os_error() == Some(EFAULT) => {
                        counts = false;
                        continue;
                    }
                    sent => sent,
                }
            }
            _ if sent == 0 => return Ok(false),
            _ if !before.is_empty() => {
                counts = false;
                wire.send(before)
            }
            _ => {
                counts = false;
                wire.send(&ZEROS[..left.min(ZEROS.len())])
            }
        };
        let is_full = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        // What has been sent whole counts.
        if result.as_ref().is_err_and(is_full) && !wanted() && left > 0 {
            counts = false;
            staged.end_at(data_end);
        }
        sent += or_wait(wire, result)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
