//! Where a listener can be, and where it can't.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};

use blockd_nbd::client::{Client, ConnectOptions};
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::{Address, Limits, ListenError, ListenerOptions, bind};
use blockd_testkit::folder::Folder;

use crate::support::{Server, unix};

fn try_bind(address: Address) -> Result<Address, ListenError> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let _entered = runtime.enter();
    let options = ListenerOptions { address, limits: Limits::default(), tls: Tls::Off };
    bind(options).map(|bound| bound.address().clone())
}

#[test]
fn a_path_that_is_too_long_is_named_with_the_limit() {
    let scratch = Folder::new("nbd").expect("a folder");
    let fits = scratch.path().as_os_str().len() + 1;
    let path = scratch.path().join("x".repeat(107 - fits));
    assert!(try_bind(unix(&path)).is_ok());
    let path = scratch.path().join("x".repeat(108 - fits));
    let error = try_bind(unix(&path)).unwrap_err().to_string();
    assert!(error.contains("108 bytes") && error.contains("at most 107"), "{error}");
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let scratch = Folder::new("nbd").expect("a folder");
    let path = scratch.path().join("file");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(try_bind(unix(&path)), Err(ListenError::NotASocket { .. })));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_socket_is_replaced_only_without_a_listener() {
    let scratch = Folder::new("nbd").expect("a folder");
    let path = scratch.path().join("nbd.sock");
    let living = UnixListener::bind(&path).unwrap();
    assert!(matches!(try_bind(unix(&path)), Err(ListenError::InUse { .. })));
    UnixStream::connect(&path).expect("it is still there");
    drop(living);
    assert!(try_bind(unix(&path)).is_ok());
}

#[test]
fn the_socket_has_the_permissions_it_should() {
    let scratch = Folder::new("nbd").expect("a folder");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    for mode in [0o600, 0o660, 0o666] {
        let path = scratch.path().join(format!("{mode:o}"));
        let address = Address::Unix { path: path.clone(), mode };
        let options = ListenerOptions { address, limits: Limits::default(), tls: Tls::Off };
        let bound = bind(options).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        drop(bound);
        assert!(!path.exists());
    }
}

#[test]
fn a_listener_that_stops_takes_its_file_along_and_leaves_connections() {
    let mut server = Server::start(Limits::default(), Tls::Off);
    let uri = server.uri("web");
    let mut client = Client::connect(&uri, &ConnectOptions::default()).unwrap();
    let mut idle = server.connect();
    idle.greet();
    let listener = server.listener.take().unwrap();
    server.runtime.block_on(listener.stop());
    assert!(!server.scratch.path().join("nbd.sock").exists());
    assert!(idle.closed());
    client.write(0, &[1; 512], false).unwrap();
    assert!(Client::connect(&uri, &ConnectOptions::default()).is_err());
}

#[test]
fn a_file_that_was_put_in_its_place_stays() {
    let scratch = Folder::new("nbd").expect("a folder");
    let path = scratch.path().join("nbd.sock");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let address = unix(&path);
    let options = ListenerOptions { address, limits: Limits::default(), tls: Tls::Off };
    let bound = bind(options).unwrap();
    std::fs::rename(&path, scratch.path().join("other")).unwrap();
    let _theirs = UnixListener::bind(&path).unwrap();
    drop(bound);
    assert!(path.exists());
}

#[test]
fn a_port_in_use_is_said_to_be() {
    let taken = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let error = try_bind(Address::Tcp(taken.local_addr().unwrap())).unwrap_err();
    assert!(matches!(error, ListenError::InUse { .. }), "{error}");
}

#[test]
fn tcp_serves_as_unix_does() {
    let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server = Server::start_at(|_| Address::Tcp(any_port), Limits::default(), Tls::Off);
    let mut client = Client::connect(&server.uri("web"), &ConnectOptions::default()).unwrap();
    client.write(4096, &[5; 4096], true).unwrap();
    let mut read = [0; 8192];
    client.read(0, &mut read).unwrap();
    assert_eq!((read[4095], read[4096]), (0, 5));
    client.disconnect().unwrap();
}
