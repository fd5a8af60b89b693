//! TLS: certificates, the upgrade of a connection, and the relay behind it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_nbd::codec::{cmd, opt, rep};
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::{Address, Limits};
use blockd_serve::nbd::tls::{TlsFiles, acceptor};
use blockd_testkit::folder::Folder;
use rcgen::{CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::support::{PATIENCE, Raw, Server, go, option, request, until};

type Encrypted<S> = Raw<StreamOwned<ClientConnection, S>>;

/// An authority, and what it signed for a server and a client, in files.
struct Identities {
    scratch: Folder,
}

impl Identities {
    fn new() -> Self {
        let scratch = Folder::new("nbd").expect("a folder");
        let mut authority = CertificateParams::new(Vec::new()).expect("parameters");
        authority.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let authority = CertifiedIssuer::self_signed(authority, key).expect("an authority");
        let write = |name: &str, text: String| {
            std::fs::write(scratch.path().join(name), text).expect("a file");
        };
        write("ca.pem", authority.pem());
        for name in ["server", "client"] {
            let key = KeyPair::generate().expect("a key");
            let params = CertificateParams::new(vec!["localhost".to_owned()]);
            let signed = params.expect("parameters").signed_by(&key, &authority);
            write(&format!("{name}.pem"), signed.expect("a certificate").pem());
            write(&format!("{name}.key"), key.serialize_pem());
        }
        Self { scratch }
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.scratch.path().join(name)
    }

    fn files(&self, verify: bool) -> TlsFiles {
        TlsFiles {
            certificate: self.file("server.pem"),
            key: self.file("server.key"),
            client_ca: verify.then(|| self.file("ca.pem")),
        }
    }

    fn client(&self, identified: bool) -> Arc<ClientConfig> {
        let read = |name: &str| std::fs::read(self.file(name)).expect("a file");
        let certificate =
            |name: &str| CertificateDer::from_pem_slice(&read(name)).expect("a certificate");
        let mut roots = RootCertStore::empty();
        roots.add(certificate("ca.pem")).expect("a root");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots);
        let config = if identified {
            let key = PrivateKeyDer::from_pem_slice(&read("client.key")).expect("a key");
            builder.with_client_auth_cert(vec![certificate("client.pem")], key).expect("identity")
        } else {
            builder.with_no_client_auth()
        };
        Arc::new(config)
    }
}

fn upgrade<S: Read + Write>(mut raw: Raw<S>, config: Arc<ClientConfig>) -> Encrypted<S> {
    raw.option(opt::STARTTLS, &[]);
    assert_eq!(raw.outcome(), rep::ACK);
    let name = ServerName::try_from("localhost").expect("a name");
    let connection = ClientConnection::new(config, name).expect("a connection");
    Raw(StreamOwned::new(connection, raw.0))
}

fn connected(server: &Server) -> Raw {
    let mut raw = server.connect();
    raw.greet();
    raw
}

fn required(identities: &Identities, verify: bool) -> Server {
    let tls = Tls::Required(acceptor(&identities.files(verify)).expect("an acceptor"));
    Server::start(Limits::default(), tls)
}

#[test]
fn an_encrypted_client_is_served_through_the_relay() {
    let identities = Identities::new();
    let server = required(&identities, false);
    let mut client = upgrade(connected(&server), identities.client(false));
    client.option(opt::GO, &go("web"));
    assert_eq!(client.outcome(), rep::ACK);
    // More in flight than the relay's buffers hold.
    let data = vec![0x5a; 1 << 20];
    for cookie in 0..4 {
        client.say(&request(cmd::WRITE, cookie, cookie << 20, 1 << 20));
        client.say(&data);
    }
    for cookie in 0..4_u64 {
        assert_eq!(client.hear(16)[8..], cookie.to_be_bytes());
    }
    client.say(&request(cmd::READ, 9, 0, 4 << 20));
    assert_eq!(client.hear(16)[4..8], [0; 4]);
    assert!(client.hear(4 << 20).iter().all(|byte| *byte == 0x5a));
    client.say(&request(cmd::DISC, 10, 0, 0));
    assert!(client.closed());
    until("the session ended", || server.ended.load(Ordering::Acquire) == 1);
}

#[test]
fn nothing_of_what_was_said_in_the_clear_counts() {
    let identities = Identities::new();
    let tls = Tls::On(acceptor(&identities.files(false)).unwrap());
    let server = Server::start(Limits::default(), tls);
    let mut raw = connected(&server);
    raw.option(opt::STRUCTURED_REPLY, &[]);
    assert_eq!(raw.outcome(), rep::ACK);
    let mut client = upgrade(raw, identities.client(false));
    client.option(opt::GO, &go("web"));
    assert_eq!(client.outcome(), rep::ACK);
    client.say(&request(cmd::READ, 1, 0, 512));
    // A simple reply: structured ones were asked for before TLS.
    assert_eq!(client.hear(528)[..4], [0x67, 0x44, 0x66, 0x98]);
}

#[test]
fn bytes_injected_before_tls_are_not_taken_for_an_option() {
    let identities = Identities::new();
    let server = required(&identities, false);
    let mut raw = connected(&server);
    // A man in the middle appends to the client's STARTTLS.
    raw.say(&[option(opt::STARTTLS, &[]), option(opt::ABORT, &[])].concat());
    assert_eq!(raw.outcome(), rep::ACK);
    // It reached TLS as garbage: an alert at most, and the end.
    let mut rest = Vec::new();
    let _ = raw.0.read_to_end(&mut rest);
    assert!(rest.len() < 20 && !rest.starts_with(&0x0003_e889_0455_65a9_u64.to_be_bytes()));
}

#[test]
fn required_means_that_nothing_is_sent_without() {
    let identities = Identities::new();
    let server = required(&identities, false);
    let mut raw = connected(&server);
    for kind in [opt::LIST, opt::INFO, opt::GO, opt::STRUCTURED_REPLY, 77] {
        raw.option(kind, &go("web"));
        assert_eq!(raw.outcome(), rep::ERR_TLS_REQD);
    }
    raw.option(opt::EXPORT_NAME, b"web");
    assert!(raw.closed());
    // Nor is TLS offered twice.
    let mut client = upgrade(connected(&server), identities.client(false));
    client.option(opt::STARTTLS, &[]);
    assert_eq!(client.outcome(), rep::ERR_INVALID);
    client.option(opt::LIST, &[]);
    assert_eq!(client.outcome(), rep::ACK);
}

#[test]
fn clients_are_verified_where_an_authority_is_given() {
    let identities = Identities::new();
    let server = required(&identities, true);
    let mut known = upgrade(connected(&server), identities.client(true));
    known.option(opt::GO, &go("web"));
    assert_eq!(known.outcome(), rep::ACK);
    let mut stranger = upgrade(connected(&server), identities.client(false));
    let _ = stranger.0.write_all(&option(opt::LIST, &[]));
    assert!(stranger.0.read(&mut [0; 1]).map_or(true, |count| count == 0));
    let foreign = Identities::new();
    let mut stranger = upgrade(connected(&server), foreign.client(true));
    assert!(stranger.0.write_all(&option(opt::LIST, &[])).is_err());
}

#[test]
fn one_that_stalls_in_tls_is_dropped_in_time() {
    let identities = Identities::new();
    let limits = Limits { handshake_time: Duration::from_secs(5), ..Limits::default() };
    let tls = Tls::On(acceptor(&identities.files(false)).unwrap());
    let server = Server::start(limits, tls);
    let mut raw = connected(&server);
    raw.option(opt::STARTTLS, &[]);
    assert_eq!(raw.outcome(), rep::ACK);
    assert!(raw.closed());
    let stats = server.listener().stats();
    until("it is counted", || stats.timed_out.load(Ordering::Relaxed) == 1);
}

#[test]
fn a_client_that_sends_no_more_still_hears_the_answers() {
    let identities = Identities::new();
    let server = required(&identities, false);
    let mut client = upgrade(connected(&server), identities.client(false));
    client.option(opt::GO, &go("web"));
    assert_eq!(client.outcome(), rep::ACK);
    for cookie in 0..20 {
        client.say(&request(cmd::READ, cookie, 0, 4096));
    }
    client.0.conn.send_close_notify();
    client.0.flush().unwrap();
    client.0.sock.shutdown(Shutdown::Write).unwrap();
    for cookie in 0..20_u64 {
        assert_eq!(client.hear(16 + 4096)[8..16], cookie.to_be_bytes());
    }
    until("the session ended", || server.ended.load(Ordering::Acquire) == 1);
}

#[test]
fn a_client_that_vanishes_ends_its_session() {
    let identities = Identities::new();
    let server = required(&identities, false);
    for _ in 0..5 {
        let mut client = upgrade(connected(&server), identities.client(false));
        client.option(opt::GO, &go("web"));
        assert_eq!(client.outcome(), rep::ACK);
        // Half a request, and no goodbye of TLS.
        client.say(&request(cmd::WRITE, 1, 0, 4096)[..20]);
    }
    until("the sessions ended", || server.ended.load(Ordering::Acquire) == 5);
}

#[test]
fn encrypted_connections_count_for_their_host_until_they_are_gone() {
    let identities = Identities::new();
    let tls = Tls::Required(acceptor(&identities.files(false)).unwrap());
    let limits = Limits { connections_per_peer: 3, ..Limits::default() };
    let local = Address::Tcp(([127, 0, 0, 1], 0).into());
    let server = Server::start_at(|_| local, limits, tls);
    let Address::Tcp(address) = *server.listener().address() else { unreachable!() };
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Raw(stream)
    };
    // One in its handshake, and two with an export.
    let mut negotiating = connect();
    negotiating.greet();
    let mut entered: Vec<_> = (0..2)
        .map(|_| {
            let mut raw = connect();
            raw.greet();
            let mut client = upgrade(raw, identities.client(false));
            client.option(opt::GO, &go("web"));
            assert_eq!(client.outcome(), rep::ACK);
            client
        })
        .collect();
    assert!(connect().closed());
    let stats = server.listener().stats();
    assert_eq!(stats.peer_refused.load(Ordering::Relaxed), 1);
    // The relay's socket counts for as long as it is open.
    entered.pop();
    until("its place is free", || connect().0.read(&mut [0]).is_ok_and(|count| count == 1));
}

#[test]
fn a_relay_ends_when_its_client_reads_no_replies() {
    let identities = Identities::new();
    let tls = Tls::Required(acceptor(&identities.files(false)).unwrap());
    let limits = Limits { send_time: Duration::from_millis(300), ..Limits::default() };
    let server = Server::start(limits, tls);
    let mut client = upgrade(connected(&server), identities.client(false));
    client.option(opt::GO, &go("web"));
    assert_eq!(client.outcome(), rep::ACK);
    // More than sockets and relay hold. The session waits for its end of the relay.
    for cookie in 0..4 {
        client.say(&request(cmd::READ, cookie, 0, 8 << 20));
    }
    until("the session ended", || server.ended.load(Ordering::Acquire) == 1);
}

#[test]
fn files_that_are_missing_or_wrong_are_named() {
    let identities = Identities::new();
    let good = identities.files(false);
    let garbage = identities.file("garbage");
    let broken = identities.file("broken");
    std::fs::write(&garbage, "nothing of the kind").unwrap();
    std::fs::write(&broken, "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n")
        .unwrap();
    let absent = Path::new("/nonexistent.pem").to_owned();
    let fails = |files: TlsFiles, path: &Path, why: &str| {
        let error = acceptor(&files).map(drop).unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()) && error.contains(why), "{error}");
    };
    let certificate = |path: &Path| TlsFiles { certificate: path.to_owned(), ..good.clone() };
    fails(certificate(&absent), &absent, "can't read");
    fails(certificate(&garbage), &garbage, "no certificate");
    fails(certificate(&broken), &broken, "not PEM");
    let key = |path: &Path| TlsFiles { key: path.to_owned(), ..good.clone() };
    fails(key(&absent), &absent, "can't read");
    fails(key(&garbage), &garbage, "no private key");
    // A key, but of another certificate.
    let other = identities.file("client.key");
    fails(key(&other), &other, "can't be used");
    let ca = |path: &Path| TlsFiles { client_ca: Some(path.to_owned()), ..good.clone() };
    fails(ca(&garbage), &garbage, "no certificate");
}

#[test]
fn without_tls_a_client_can_go_on_in_the_clear() {
    let server = Server::start(Limits::default(), Tls::Off);
    let mut raw = connected(&server);
    raw.option(opt::STARTTLS, &[]);
    assert_eq!(raw.outcome(), rep::ERR_POLICY);
    raw.option(opt::GO, &go("web"));
    assert_eq!(raw.outcome(), rep::ACK);
}
