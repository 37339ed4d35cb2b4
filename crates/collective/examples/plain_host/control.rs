//! Its connection to the controller.

use std::fmt::Display;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use millstream_inc::protocol::{Commanded, FrameDecoder, FromController, ToController, encode};

/// A connection whose pings a thread of its own answers.
pub(super) struct Control {
    stream: TcpStream,
    heard: Receiver<Result<FromController, String>>,
    listener: Option<JoinHandle<()>>,
}

impl Control {
    pub(super) fn connect(controller: &str) -> Result<Self, String> {
        let failed = |error: &dyn Display| format!("the controller at {controller}: {error}");
        let stream = TcpStream::connect(controller).map_err(|error| failed(&error))?;
        let mut heard_by = stream.try_clone().map_err(|error| failed(&error))?;
        let (sender, heard) = mpsc::channel();
        let listener = thread::spawn(move || {
            let ended = listen(&mut heard_by, |message| sender.send(Ok(message)).is_ok());
            // Nobody may wait for it any more.
            let _ = sender.send(Err(ended));
        });
        Ok(Self { stream, heard, listener: Some(listener) })
    }

    pub(super) fn say(&self, message: &ToController) -> Result<(), String> {
        say(&self.stream, message)
    }

    /// The next message but pings, word of what is waited for, and where controllers are.
    pub(super) fn hear(&self, patience: Duration) -> Result<FromController, String> {
        loop {
            match self.heard.recv_timeout(patience) {
                Ok(Ok(FromController::Waiting { .. } | FromController::Controllers { .. })) => {}
                Ok(Ok(FromController::Abort { reason })) => return Err(reason.to_string()),
                Ok(Ok(FromController::Refused { reason })) => return Err(reason.to_string()),
                Ok(heard) => return heard,
                Err(_) => return Err(format!("the controller is silent for {patience:?}")),
            }
        }
    }

    /// Why the group is over, if it is.
    pub(super) fn trouble(&self) -> Result<(), String> {
        loop {
            match self.heard.try_recv() {
                Ok(Ok(FromController::Left { .. } | FromController::Controllers { .. })) => {}
                Ok(Ok(FromController::Abort { reason })) => return Err(reason.to_string()),
                Ok(Ok(other)) => return Err(format!("the controller says {other:?}")),
                Ok(Err(error)) => return Err(error),
                // The listener's last word was taken before.
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

/// Answers pings, and tells `tell` of all else, until that wants no more or the connection ends. Says how it ended.
fn listen(stream: &mut TcpStream, tell: impl Fn(FromController) -> bool) -> String {
    let (mut decoder, mut buffer) = (FrameDecoder::new(), [0; 4096]);
    loop {
        match decoder.next_message::<Commanded>() {
            Ok(Some(Commanded { message: FromController::Ping, .. })) => {
                if let Err(error) = say(stream, &ToController::Pong) {
                    return error;
                }
            }
            Ok(Some(Commanded { message, .. })) => {
                if !tell(message) {
                    return "nobody listens".to_owned();
                }
            }
            Ok(None) => match stream.read(&mut buffer) {
                Ok(0) => return "the controller has closed the connection".to_owned(),
                Ok(count) => decoder.extend(&buffer[..count]),
                Err(error) => return format!("the connection to the controller: {error}"),
            },
            Err(error) => return error.to_string(),
        }
    }
}

fn say(mut stream: &TcpStream, message: &ToController) -> Result<(), String> {
    let frame = encode(message).map_err(|error| error.to_string())?;
    stream.write_all(&frame).map_err(|error| format!("cannot tell the controller: {error}"))
}
