//! Connections of other hosts' daemons, of which a limited number is served at once.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// A connection with a place.
#[derive(Debug)]
pub(super) struct Placed {
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
}

/// The connections of a listener. Beyond `limit` they wait, in the order in which they came, until
/// another one ends.
pub(super) fn placed(
    listener: TcpListener,
    limit: usize,
) -> impl Stream<Item = io::Result<Placed>> {
    let places = Arc::new(Semaphore::new(limit));
    TcpListenerStream::new(listener).then(move |stream| {
        let places = Arc::clone(&places);
        async move {
            let stream = stream?;
            let place = places.acquire_owned().await.map_err(io::Error::other)?;
            Ok(Placed { stream, _place: place })
        }
    })
}

impl Placed {
    fn stream(self: Pin<&mut Self>) -> Pin<&mut TcpStream> {
        Pin::new(&mut self.get_mut().stream)
    }
}

impl Connected for Placed {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Placed {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream().poll_read(context, buffer)
    }
}

impl AsyncWrite for Placed {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream().poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_beyond_the_limit_waits_until_another_one_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = Box::pin(placed(listener, 2));
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(TcpStream::connect(address).await.unwrap());
        }
        let first = connections.next().await.unwrap().unwrap();
        let _second = connections.next().await.unwrap().unwrap();
        let mut third = Box::pin(connections.next());
        let waits =
            |context: &mut Context<'_>| Poll::Ready(third.as_mut().poll(context).is_pending());
        assert!(std::future::poll_fn(waits).await);
        drop(first);
        assert!(third.await.unwrap().is_ok());
    }
}
