//! The proof of a token over sockets that block: at a port that is called, and by who calls.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::stream::{Until, drain, over, write_frame};
use crate::token::{Initiator, MESSAGE_LIMIT, Responder, verdict};
use crate::{
    Frame, FrameDecoder, PeerTls, Purpose, TlsError, TlsSession, Token, TokenError, begins_tls,
};

/// Admits those to a port who have the token, or a certificate, or both.
#[derive(Clone, Debug)]
pub struct Gate {
    token: Option<Token>,
    tls: Option<PeerTls>,
    purpose: Purpose,
    name: String,
}

/// Why two ends came to no proof.
#[derive(Debug, Error)]
pub enum ProofError {
    /// By their tokens.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// By their certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// By the connection.
    #[error("the connection failed before both had proved who they are: {0}")]
    Io(io::Error),
}

impl From<io::Error> for ProofError {
    fn from(error: io::Error) -> Self {
        match TlsError::of(&error) {
            Some(error) => Self::Tls(error.clone()),
            None => Self::Io(error),
        }
    }
}

impl Gate {
    /// For a port with this purpose, of an engine that is called so.
    pub fn new(token: Token, purpose: Purpose, name: &str) -> Self {
        Self { token: Some(token), tls: None, purpose, name: name.to_owned() }
    }

    /// The same, with what there is of a token and a certificate: there is a gate where there is one of them.
    pub fn with(
        token: Option<Token>,
        tls: Option<PeerTls>,
        purpose: Purpose,
        name: &str,
    ) -> Option<Self> {
        let is_one = token.is_some() || tls.is_some();
        is_one.then(|| Self { token, tls, purpose, name: name.to_owned() })
    }

    /// What is asked of callers, and proved to who is called.
    pub const fn token(&self) -> Option<Token> {
        self.token
    }

    /// What there is TLS by.
    pub const fn tls(&self) -> Option<&PeerTls> {
        self.tls.as_ref()
    }

    /// Waits until the caller has proved what is asked of him: all that follows goes over the session, if there is
    /// one. Who has not is told why, and is to be let go. Changes the timeouts of the socket.
    pub fn admit(
        &self,
        stream: &TcpStream,
        deadline: Instant,
    ) -> Result<Option<TlsSession>, ProofError> {
        let mut session = None;
        let result = self.try_admit(stream, deadline, &mut session);
        if let Err(error) = &result {
            let told = match error {
                ProofError::Token(error) => {
                    let stream = over(&mut session, stream, deadline);
                    write_frame(stream, &verdict(error)).is_ok()
                }
                // TLS has said it.
                ProofError::Tls(_) => true,
                ProofError::Io(_) => false,
            };
            // What he still says must not take back what was said to him.
            if told {
                let _ = stream.shutdown(Shutdown::Write);
                drain(stream, deadline);
            }
        }
        result.map(|()| session)
    }

    fn try_admit(
        &self,
        stream: &TcpStream,
        deadline: Instant,
        session: &mut Option<TlsSession>,
    ) -> Result<(), ProofError> {
        if let Some(tls) = &self.tls {
            stream.set_read_timeout(Some(time_left(deadline)?))?;
            let mut first = [0; 3];
            let count = stream.peek(&mut first)?;
            // He understands no alert of TLS.
            if !begins_tls(&first[..count]) {
                return Err(TokenError::TlsNeeded.into());
            }
            let session = session.insert(tls.called()?);
            if !session.handshake(&mut Until::new(stream, deadline))? {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
        }
        let Some(token) = self.token else { return Ok(()) };
        let address = stream.local_addr()?;
        let mut responder = Responder::new(token, self.purpose, address, &self.name);
        loop {
            // Whose first words are no frame, or too long, has none.
            let frame = match read(over(session, stream, deadline)) {
                Err(error)
                    if error.kind() == io::ErrorKind::InvalidData
                        && TlsError::of(&error).is_none() =>
                {
                    return Err(TokenError::Needed.into());
                }
                frame => frame?,
            };
            let (frame, is_proved) = responder.take(&frame)??;
            over(session, stream, deadline).write_all(&frame.encode())?;
            if is_proved {
                return Ok(());
            }
        }
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Has TLS with who was connected to by this host, where there is a certificate, and then both prove that they have the
/// token, where there is one. All that follows goes over the session. Changes the timeouts of the socket.
pub fn prove(
    stream: &TcpStream,
    tls: Option<(&PeerTls, &str)>,
    token: Option<Token>,
    purpose: Purpose,
    deadline: Instant,
) -> Result<Option<TlsSession>, ProofError> {
    let mut session = None;
    if let Some((tls, host)) = tls {
        let session = session.insert(tls.calling(host)?);
        if !session.handshake(&mut Until::new(stream, deadline))? {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
    }
    let Some(token) = token else { return Ok(session) };
    let address: SocketAddr = stream.peer_addr()?;
    let mut initiator = Initiator::new(token, purpose, address, None)?;
    let mut said = initiator.opening();
    loop {
        over(&mut session, stream, deadline).write_all(&said.encode())?;
        let frame = match read(over(&mut session, stream, deadline)) {
            Err(error)
                if error.kind() == io::ErrorKind::InvalidData && TlsError::of(&error).is_none() =>
            {
                return Err(TokenError::NoProof.into());
            }
            frame => frame?,
        };
        match initiator.take(&frame)? {
            Some(frame) => said = frame,
            None => return Ok(session),
        }
    }
}

/// A frame, and nothing of what follows it.
fn read(mut stream: impl Read) -> io::Result<Frame> {
    let mut decoder = FrameDecoder::new(MESSAGE_LIMIT);
    let mut buffer = [0; MESSAGE_LIMIT];
    let malformed = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    loop {
        let wanted = decoder.wants().map_err(malformed)?.min(buffer.len());
        let count = match stream.read(&mut buffer[..wanted]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        decoder.push(&buffer[..count]).map_err(malformed)?;
        if let Some(frame) = decoder.take() {
            return Ok(frame);
        }
    }
}
