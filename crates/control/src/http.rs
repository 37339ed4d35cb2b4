//! Serving HTTP: connections from their first byte to their last, and what clients can make a daemon hold.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

/// How long the head of a request may take to come, also the first byte of the next one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection lives: clients make another. Then requests under way have so long to end.
const CONNECTION_LIFETIME: Duration = Duration::from_secs(60);
const LAST_REQUEST: Duration = Duration::from_secs(15);

/// How long requests have that are under way at the end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long nothing is accepted after the system had no room for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The most bytes of the head of a request.
const HEAD_LENGTH: usize = 16 << 10;

/// What a request is answered with.
pub(crate) type Answer = Result<Response<Full<Bytes>>, Infallible>;

/// Serves connections until `shutdown` is over, at most so many at a time. Each is admitted first, which may
/// take as long as the head of a request.
pub(crate) async fn serve<Stream, Admitting, Answering>(
    listener: TcpListener,
    most: usize,
    admit: impl Fn(TcpStream) -> Admitting + Clone + Send + 'static,
    answer: impl Fn(Request<Incoming>) -> Answering + Clone + Send + Sync + 'static,
    mut shutdown: Pin<&mut impl Future<Output = ()>>,
) where
    Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    Admitting: Future<Output = io::Result<Stream>> + Send + 'static,
    Answering: Future<Output = Answer> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(most));
    let (ending, ended) = watch::channel(());
    let mut failing = false;
    let mut full = false;
    let mut connections = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            () = &mut shutdown => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, client)) => {
                failing = false;
                connections.retain(|connection: &AbortHandle| !connection.is_finished());
                // One that asks nothing keeps nobody out: whose connection closes makes another.
                let oldest = (connections.len() >= most).then(|| connections.pop_front()).flatten();
                if let Some(oldest) = oldest {
                    oldest.abort();
                    if !std::mem::replace(&mut full, true) {
                        tracing::warn!(%client, "too many connections: the oldest ones are closed");
                    }
                } else {
                    full = false;
                }
                let Ok(place) = Arc::clone(&places).acquire_owned().await else { break };
                // Small replies that someone waits for. Failing, they are late.
                let _ = stream.set_nodelay(true);
                let connection = converse(admit(stream), answer.clone(), place, ended.clone());
                connections.push_back(tokio::spawn(connection).abort_handle());
            }
            Err(error) => {
                // Out of file descriptors, most likely: some will be closed.
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "cannot accept connections; trying again");
                }
                tokio::select! {
                    () = &mut shutdown => break,
                    () = sleep(ACCEPT_PAUSE) => {}
                }
            }
        }
    }
    drop(ending);
    // All places are free when all connections have ended.
    let all = u32::try_from(most).unwrap_or(u32::MAX);
    let _ = timeout(CLOSE_TIMEOUT, places.acquire_many(all)).await;
}

/// One connection, from its first byte to its last.
async fn converse<Stream, Answering>(
    admitting: impl Future<Output = io::Result<Stream>>,
    answer: impl Fn(Request<Incoming>) -> Answering,
    place: OwnedSemaphorePermit,
    mut ended: watch::Receiver<()>,
) where
    Stream: AsyncRead + AsyncWrite + Unpin,
    Answering: Future<Output = Answer>,
{
    let admitted = tokio::select! {
        admitted = timeout(HEAD_TIMEOUT, admitting) => admitted,
        _ = ended.changed() => return,
    };
    let stream = match admitted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(stream) => stream,
        Err(error) => {
            tracing::debug!(%error, "a client is not admitted");
            return;
        }
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_LENGTH)
        .serve_connection(TokioIo::new(stream), service_fn(answer));
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = &mut connection => result,
        () = sleep(CONNECTION_LIFETIME) => {
            connection.as_mut().graceful_shutdown();
            timeout(LAST_REQUEST, connection).await.unwrap_or(Ok(()))
        }
        _ = ended.changed() => {
            connection.as_mut().graceful_shutdown();
            timeout(CLOSE_TIMEOUT, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "a connection failed");
    }
    drop(place);
}
