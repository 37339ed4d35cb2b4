//! What the two sides of a test tell each other besides RDMA: lines of JSON over the TCP connection
//! on which they exchanged their addresses.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use serde::{Deserialize, Serialize};
use socket2::{SockRef, TcpKeepalive};

use super::agreement::Description;
use super::figures::Outcome;

/// Between looks at the clock, while a line is awaited.
const LOOK: Duration = Duration::from_secs(10);
/// A sign of life. The next line may begin with it, as JSON may.
const SIGN: u8 = b' ';
/// How often a client gives one whose messages the server's processor does not see.
const SIGN_EVERY: Duration = Duration::from_secs(1);
/// So late may one come of a client that waits for a completion.
pub(super) const SIGNS_LATE: Duration = Duration::from_secs(3);
/// No side says more at a time.
const LINE_MAX: usize = 1 << 20;
/// A machine that is gone says nothing; this long after the last sign of life we ask for one, and
/// then each [`ASK_EVERY`], [`ASK_TIMES`] times.
const ASK_AFTER: Duration = Duration::from_secs(5);
const ASK_EVERY: Duration = Duration::from_secs(2);
const ASK_TIMES: u32 = 5;

/// A line.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    /// First, each side says what it is about to do.
    Test(Description),
    /// Each side is ready for messages of this size.
    Ready { size: u32 },
    /// The client has done its part and measured this; it has checked so many bytes.
    Measured { outcome: Outcome, checked: u64 },
    /// The server has got all of it; it has checked so many bytes.
    Checked { bytes: u64 },
    /// The sender gives up, and says why.
    Failed { why: String },
}

impl Message {
    /// What kind it is.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Test(_) => "what it is about to do",
            Self::Ready { .. } => "that it is ready",
            Self::Measured { .. } => "what it has measured",
            Self::Checked { .. } => "what it has checked",
            Self::Failed { .. } => "that it failed",
        }
    }
}

/// The connection to the other side.
pub(super) struct Control {
    stream: TcpStream,
    /// What was read, and is no line yet.
    unread: Vec<u8>,
    peer: &'static str,
    /// For the other side's next line, when it has nothing else to do.
    timeout: Duration,
    /// When something came last.
    heard: Instant,
    /// When a sign of life was given last.
    signed: Instant,
    /// Whether the other side gives such signs.
    has_signs: bool,
}

impl Control {
    /// `peer` is what the other side is called.
    pub(super) fn new(
        stream: TcpStream,
        peer: &'static str,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        let keepalive = TcpKeepalive::new()
            .with_time(ASK_AFTER)
            .with_interval(ASK_EVERY)
            .with_retries(ASK_TIMES);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive).context("cannot set a timeout")?;
        stream.set_nodelay(true).context("cannot send lines at once")?;
        let now = Instant::now();
        Ok(Self {
            stream,
            unread: Vec::new(),
            peer,
            timeout,
            heard: now,
            signed: now,
            has_signs: true,
        })
    }

    /// Without, silence says nothing while the other side measures.
    pub(super) fn expect_signs(&mut self, has_signs: bool) {
        self.has_signs = has_signs;
    }

    /// What the other side is called.
    pub(super) fn peer(&self) -> &'static str {
        self.peer
    }

    pub(super) fn send(&mut self, message: &Message) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(message).context("a message is no JSON")?;
        line.push(b'\n');
        self.stream.write_all(&line).with_context(|| {
            format!("cannot tell the {} anything: it has closed the connection", self.peer)
        })
    }

    /// Says that this side is there, unless it has done so lately; whether it was said.
    pub(super) fn give_sign(&mut self, now: Instant) -> bool {
        let is_due = now.saturating_duration_since(self.signed) >= SIGN_EVERY;
        if is_due {
            self.signed = now;
            // If the other side is gone, that shows elsewhere, with the reason.
            let _ = self.stream.write_all(&[SIGN]);
        }
        is_due
    }

    /// The next line, soon.
    pub(super) fn receive(&mut self) -> anyhow::Result<Message> {
        self.receive_before(self.timeout)
    }

    /// The next line, in this time.
    pub(super) fn receive_before(&mut self, timeout: Duration) -> anyhow::Result<Message> {
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(self.said_nothing(timeout));
            }
            if let Some(message) = self.receive_within(left.min(LOOK))? {
                return Ok(message);
            }
        }
    }

    /// The next line, however long that takes, as long as the other side is not silent for this time, if it gives signs.
    pub(super) fn receive_while_alive(&mut self, silence: Duration) -> anyhow::Result<Message> {
        let silence = if self.has_signs { silence } else { Duration::MAX };
        self.heard = Instant::now();
        loop {
            let left = silence.saturating_sub(self.heard.elapsed());
            if left.is_zero() {
                return Err(self.said_nothing(silence));
            }
            if let Some(message) = self.receive_within(left.min(LOOK))? {
                return Ok(message);
            }
        }
    }

    fn said_nothing(&self, silence: Duration) -> anyhow::Error {
        let peer = self.peer;
        anyhow!(
            "the {peer} has said nothing for {silence:?}: has it stopped? (--timeout waits longer)"
        )
    }

    /// For who waits for the other side's messages, and not for its lines.
    pub(super) fn nothing_came(&self, patience: Duration) -> anyhow::Error {
        let peer = self.peer;
        anyhow!(
            "nothing has come from the {peer} for {patience:?}: has it stopped, or its link? (--timeout waits longer)"
        )
    }

    /// The next line, if it is there already.
    pub(super) fn poll(&mut self) -> anyhow::Result<Option<Message>> {
        self.stream.set_nonblocking(true).context("cannot look for a line")?;
        let message = self.read();
        self.stream.set_nonblocking(false).context("cannot wait for lines")?;
        message
    }

    /// Why the other side gave up, if it has just said so.
    pub(super) fn complaint(&mut self) -> Option<anyhow::Error> {
        match self.poll() {
            Err(error) => error.is::<GaveUp>().then_some(error),
            Ok(_) => None,
        }
    }

    fn receive_within(&mut self, timeout: Duration) -> anyhow::Result<Option<Message>> {
        self.stream.set_read_timeout(Some(timeout)).context("cannot set a timeout")?;
        self.read()
    }

    /// Reads once, or more often until there is a line; `None` when nothing comes but signs of life.
    fn read(&mut self) -> anyhow::Result<Option<Message>> {
        let peer = self.peer;
        let mut bytes = [0; 4096];
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return parse(&line, peer).map(Some);
            }
            if self.unread.len() > LINE_MAX {
                bail!("the {peer} has sent a line of more than {LINE_MAX} bytes");
            }
            match self.stream.read(&mut bytes) {
                Ok(0) => bail!(
                    "the {peer} has closed the connection before the test was over: it says why"
                ),
                Ok(count) => {
                    self.heard = Instant::now();
                    self.unread.extend_from_slice(&bytes[..count]);
                    if self.unread.iter().all(|&byte| byte == SIGN) {
                        self.unread.clear();
                        return Ok(None);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) && error.raw_os_error() != Some(libc::ETIMEDOUT) =>
                {
                    return Ok(None);
                }
                Err(error) => {
                    return Err(error).with_context(|| format!("the {peer} is gone"));
                }
            }
        }
    }
}

/// The other side gave up, and said why.
#[derive(Debug, thiserror::Error)]
#[error("the {peer} gave up: {why}")]
pub(super) struct GaveUp {
    peer: &'static str,
    why: String,
}

fn parse(line: &[u8], peer: &'static str) -> anyhow::Result<Message> {
    match serde_json::from_slice(line) {
        Ok(Message::Failed { why }) => {
            // It is shown on a terminal, and not ours.
            let why = why.chars().filter(|char| !char.is_control()).take(1000).collect();
            Err(GaveUp { peer, why }.into())
        }
        Ok(message) => Ok(message),
        Err(_) => {
            let start = String::from_utf8_lossy(&line[..line.len().min(60)]).into_owned();
            bail!("the {peer} said {start:?}: is it of the same version of millstream?")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn pair() -> (Control, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        (Control::new(stream, "server", PATIENCE).unwrap(), other)
    }

    #[test]
    fn lines_come_one_by_one_however_they_were_cut() {
        let (mut control, mut other) = pair();
        assert!(control.poll().unwrap().is_none());
        other.write_all(b"{\"ready\":{\"si").unwrap();
        assert!(control.poll().unwrap().is_none());
        other.write_all(b"ze\":17}}\n{\"checked\":{\"bytes\":5}}\n").unwrap();
        assert!(matches!(control.receive().unwrap(), Message::Ready { size: 17 }));
        assert!(matches!(control.poll().unwrap(), Some(Message::Checked { bytes: 5 })));
        drop(other);
        assert!(control.receive().unwrap_err().to_string().contains("closed the connection"));
    }

    #[test]
    fn a_side_that_gives_up_says_why() {
        let (mut control, other) = pair();
        let mut other = Control::new(other, "client", PATIENCE).unwrap();
        other.send(&Message::Failed { why: "no\x1b memory".to_owned() }).unwrap();
        let error = control.receive().unwrap_err();
        assert_eq!(error.to_string(), "the server gave up: no memory");
    }

    #[test]
    fn who_gives_signs_of_life_is_waited_for() {
        let (mut control, other) = pair();
        let mut other = Control::new(other, "client", PATIENCE).unwrap();
        let start = Instant::now();
        let teller = std::thread::spawn(move || {
            for number in 1..=6 {
                std::thread::sleep(Duration::from_millis(500));
                let now = start + SIGN_EVERY * number;
                assert!(other.give_sign(now) && !other.give_sign(now));
            }
            other.send(&Message::Checked { bytes: 5 }).unwrap();
            other
        });
        let message = control.receive_while_alive(Duration::from_secs(2)).unwrap();
        assert!(matches!(message, Message::Checked { bytes: 5 }));
        let _other = teller.join().unwrap();
        let error = control.receive_while_alive(Duration::from_millis(100)).unwrap_err();
        assert!(error.to_string().contains("said nothing for 100ms"), "{error}");
    }

    #[test]
    fn signs_of_life_are_no_lines() {
        let (mut control, other) = pair();
        let mut other = Control::new(other, "client", PATIENCE).unwrap();
        assert!(other.give_sign(Instant::now() + SIGN_EVERY));
        other.stream.write_all(b"{\"checked\":").unwrap();
        let error = control.receive_before(Duration::from_millis(100)).unwrap_err();
        assert!(error.to_string().contains("--timeout"), "{error}");
        other.stream.write_all(b"{\"bytes\":5}}\n").unwrap();
        assert!(matches!(control.receive().unwrap(), Message::Checked { bytes: 5 }));
    }

    #[test]
    fn garbage_is_told_and_bounded() {
        let (mut control, mut other) = pair();
        other.write_all(b"HTTP/1.1 200 OK\r\n").unwrap();
        let error = control.receive().unwrap_err().to_string();
        assert!(error.contains("HTTP/1.1 200 OK"), "{error}");
        let flood = std::thread::spawn(move || while other.write_all(&[b'x'; 65536]).is_ok() {});
        let error = control.receive().unwrap_err().to_string();
        assert!(error.contains("more than"), "{error}");
        drop(control);
        flood.join().unwrap();
    }
}
