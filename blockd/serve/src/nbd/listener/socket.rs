//! Sockets to listen on.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, setsockopt, socket, sockopt,
};
use nix::sys::stat::{Mode, fchmod};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener};

use super::{Address, ListenError};

/// The longest path that fits a socket's address, without the NUL at its end.
pub(super) const MAX_PATH_BYTES: usize = 107;

/// Connections that wait to be accepted.
const BACKLOG: u16 = 1024;

/// How many seconds a TCP client may be silent before it is asked whether it is there, how
/// many seconds between questions, and how many of them stay unanswered before it is gone.
const KEEP_ALIVE: (u32, u32, u32) = (60, 10, 6);

/// The file of a socket; removed with it, if it is still the same.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let same =
            |file: &fs::Metadata| file.file_type().is_socket() && identity(file) == self.identity;
        if fs::symlink_metadata(&self.path).is_ok_and(|file| same(&file)) {
            // It may stay: the next start removes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(file: &fs::Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

/// A Unix socket at `path`. A socket file without a listener is replaced.
pub(super) fn bind_unix(path: &Path, mode: u32) -> Result<(UnixListener, SocketFile), ListenError> {
    let length = path.as_os_str().len();
    if length > MAX_PATH_BYTES {
        return Err(ListenError::PathTooLong { path: path.to_owned(), length });
    }
    let address = || Address::Unix { path: path.to_owned(), mode };
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse { address: address() },
        _ => ListenError::Io { address: address(), source },
    };
    make_room(path, &address)?;
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::Stream, flags, None);
    let listener = listener.map_err(|error| failed(error.into()))?;
    // The file takes its permissions from the socket, less the umask, so that there is no
    // moment in which it has more than it should.
    let bits = Mode::from_bits_truncate(mode);
    let bound = fchmod(&listener, bits)
        .and_then(|()| UnixAddr::new(path))
        .and_then(|name| bind(listener.as_raw_fd(), &name));
    bound.map_err(|error| failed(error.into()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o777)).map_err(failed)?;
    let file = fs::symlink_metadata(path).map_err(failed)?;
    let file = SocketFile { path: path.to_owned(), identity: identity(&file) };
    let backlog = Backlog::new(i32::from(BACKLOG)).unwrap_or(Backlog::MAXCONN);
    listen(&listener, backlog).map_err(|error| failed(error.into()))?;
    let listener = std::os::unix::net::UnixListener::from(listener);
    Ok((UnixListener::from_std(listener).map_err(failed)?, file))
}

/// Removes a socket without a listener.
fn make_room(path: &Path, address: &impl Fn() -> Address) -> Result<(), ListenError> {
    let failed = |source| ListenError::Io { address: address(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    match StdUnixStream::connect(path) {
        // Only this error shows that there is no listener. A full backlog, for example, means a
        // busy one.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(failed(error)),
        _ => Err(ListenError::InUse { address: address() }),
    }
}

/// A TCP socket at `wanted`.
pub(super) fn bind_tcp(wanted: SocketAddr) -> Result<TcpListener, ListenError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse { address: Address::Tcp(wanted) },
        _ => ListenError::Io { address: Address::Tcp(wanted), source },
    };
    let socket = if wanted.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    let socket = socket.map_err(failed)?;
    // So that a restart doesn't have to wait for connections that just ended.
    socket.set_reuseaddr(true).map_err(failed)?;
    socket.bind(wanted).map_err(failed)?;
    socket.listen(u32::from(BACKLOG)).map_err(failed)
}

/// Sets the options of a TCP connection: replies are not delayed, and a client that vanishes is
/// detected.
pub(super) fn prepare_tcp(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (idle, interval, count) = KEEP_ALIVE;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &idle)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &interval)?;
    setsockopt(stream, sockopt::TcpKeepCount, &count)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::getsockopt;

    use super::*;

    #[tokio::test]
    async fn silent_clients_over_tcp_are_asked_whether_they_are_there() {
        let listener = bind_tcp(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        assert!(!getsockopt(&stream, sockopt::KeepAlive).unwrap());
        prepare_tcp(&stream).unwrap();
        assert!(getsockopt(&stream, sockopt::KeepAlive).unwrap());
        let seconds = (
            getsockopt(&stream, sockopt::TcpKeepIdle).unwrap(),
            getsockopt(&stream, sockopt::TcpKeepInterval).unwrap(),
            getsockopt(&stream, sockopt::TcpKeepCount).unwrap(),
        );
        assert_eq!(seconds, (60, 10, 6));
        assert!(stream.nodelay().unwrap());
    }
}
