//! Sending to a target, from memory that may be unregistered meanwhile.

use std::io;
use std::time::Duration;

use millstream_net::stream::Readiness;

use super::flow::Part;
use super::protocol::{EFAULT, Request};
use super::wire::Wire;

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

/// Sends a WRITE, behind what else is in `headers`; `false` when its memory is not registered any more
/// and nothing was sent. If that is so later, the target is told that the WRITE does not count; and also if
/// it is not `wanted` any more, which is asked while there is no room. Its memory is not touched after that, even
/// where the rest of the WRITE never finds room. The wire may have the end of it still: [`send_all`] sends that.
pub(super) fn send_write(
    wire: &Wire,
    headers: &[u8],
    part: &Part,
    wanted: impl Fn() -> bool,
) -> io::Result<bool> {
    let data_end = headers.len() + part.length as usize;
    let mut counts = true;
    let mut sent = 0;
    while sent < data_end + Request::end(true).len() {
        let end = Request::end(counts);
        let before = headers.get(sent..).unwrap_or_default();
        let after = &end[sent.saturating_sub(data_end)..];
        let done = sent.saturating_sub(headers.len()).min(part.length as usize);
        let left = part.length as usize - done;
        let result = match part.local.enter() {
            _ if left == 0 => wire.send(after),
            Some(inside) if counts => {
                let data = (part.address + done as u64, left as u64);
                match wire.send_memory(&inside, before, data, after) {
                    // Somebody has unmapped it.
                    Err(error) if error.raw_os_error() == Some(EFAULT) => {
                        if sent == 0 {
                            return Ok(false);
                        }
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
        }
        sent += or_wait(wire, result)?;
    }
    Ok(true)
}
