//! Messages out of a TCP connection.

use std::io;

use millstream_inc::protocol::{FrameDecoder, FrameError, Message};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Why there are no more messages.
#[derive(Debug, Error)]
pub(crate) enum ReadError {
    /// The peer has closed the connection.
    #[error("the connection was closed")]
    Closed,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Reads messages. Its methods may be cancelled at any await without losing bytes.
pub(crate) struct MessageReader<R> {
    stream: R,
    decoder: FrameDecoder,
    buffer: Box<[u8]>,
}

impl<R: AsyncRead + Unpin> MessageReader<R> {
    pub(crate) fn new(stream: R) -> Self {
        Self { stream, decoder: FrameDecoder::new(), buffer: vec![0; 8192].into() }
    }

    pub(crate) async fn next<M: Message>(&mut self) -> Result<M, ReadError> {
        loop {
            if let Some(message) = self.decoder.next_message()? {
                return Ok(message);
            }
            match self.stream.read(&mut self.buffer).await? {
                0 => return Err(ReadError::Closed),
                count => self.decoder.extend(&self.buffer[..count]),
            }
        }
    }

    /// Reads to the end and throws away: a connection that is closed with bytes unread is reset,
    /// and the peer may then not see what was sent to it last.
    pub(crate) async fn discard(&mut self) {
        while self.stream.read(&mut self.buffer).await.is_ok_and(|count| count > 0) {}
    }
}
