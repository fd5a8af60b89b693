//! The daemons of other hosts: they ask this one for cells, and this one asks them.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1;
use blockd_api::v1::peers_client::PeersClient;
use blockd_api::v1::peers_server::{Peers, PeersServer};
use blockd_hosts::HostNumber;
use blockd_media::error::{Error, shown};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::transport::{
    Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig,
};
use tonic::{Request, Response, Status};

use super::groups::Group;
use super::{Control, blocking};
use crate::config::HostsTls;

/// How long another host's daemon may take to accept a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How long the name of another host may take to be resolved: as long as two tries of glibc, 5 s
/// each.
const LOOKUP_LIMIT: Duration = Duration::from_secs(10);
/// How long it may take for a call: to answer what is in flight and to close the pool, 10 s each,
/// and LVM's command.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(40);
/// How often a daemon is tried before it counts as silent: one that is being restarted refuses
/// connections for a second or two, and packets get lost.
const PROBES: usize = 3;
/// Between two of these.
const PROBE_PAUSE: Duration = Duration::from_secs(1);
/// Calls of one host at once: one for each cell that it asks for now.
const CALLS_AT_ONCE: usize = 32;
/// Connections at once: a call makes one of its own, and a group of LVM has up to 2,000 hosts, few
/// of which ask the same host in the same minute.
const MAX_CONNECTIONS: usize = 256;
/// Largest request: two names.
const MAX_REQUEST_BYTES: usize = 4 << 10;
/// Largest answer: ten thousand volumes, each with a name of 128 bytes.
const MAX_ANSWER_BYTES: usize = 4 << 20;

/// A port for other hosts that is bound and not served yet.
#[derive(Debug)]
pub struct PeerListener {
    listener: TcpListener,
    tls: Option<ServerTlsConfig>,
}

/// Whether another host lives, as far as can be seen from here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Life {
    /// Something answers in its place; where.
    Answers(String),
    /// Nothing answers where its daemon should.
    Silent,
    /// Whether it answers can't be found out; why. No sign of death.
    NotKnown(String),
}

/// This host's side of a connection, and the authority of the other side's certificate.
fn identity(tls: &HostsTls) -> Result<(Identity, Certificate), Error> {
    let read = |path: &std::path::Path| {
        std::fs::read(path).map_err(|error| Error::file("read", path, error))
    };
    let identity = Identity::from_pem(read(&tls.certificate)?, read(&tls.key)?);
    Ok((identity, Certificate::from_pem(read(&tls.ca)?)))
}

impl PeerListener {
    /// Binds the port. Has to be called in a tokio runtime.
    ///
    /// # Errors
    /// If the port is in use, or a certificate can't be read.
    pub async fn bind(address: SocketAddr, tls: Option<&HostsTls>) -> Result<Self, Error> {
        let tls = tls.map(identity).transpose()?.map(|(identity, ca)| {
            ServerTlsConfig::new().identity(identity).client_ca_root(ca).timeout(CONNECT_LIMIT)
        });
        let bound = TcpListener::bind(address).await;
        let listener = bound
            .map_err(|error| Error::io(format!("listen at {address} (hosts.listen)"), error))?;
        Ok(Self { listener, tls })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Serves other hosts until `stop` ends.
    ///
    /// # Errors
    /// If the certificates can't be used.
    pub async fn serve(
        self,
        control: Control,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Error> {
        let failed = |error: tonic::transport::Error| Error::Unexpected {
            what: "hosts.listen".to_owned(),
            problem: crate::services::standby::with_causes(&error),
        };
        let service = PeersServer::new(control).max_decoding_message_size(MAX_REQUEST_BYTES);
        let mut server = Server::builder().concurrency_limit_per_connection(CALLS_AT_ONCE);
        if let Some(tls) = self.tls {
            server = server.tls_config(tls).map_err(failed)?;
        }
        let incoming = super::peer_places::placed(self.listener, MAX_CONNECTIONS);
        let served = server.add_service(service).serve_with_incoming_shutdown(incoming, stop);
        served.await.map_err(failed)
    }
}

#[tonic::async_trait]
impl Peers for Control {
    async fn hand_over_cell(
        &self,
        asked: Request<v1::HandOverCellRequest>,
    ) -> Result<Response<v1::HandOverCellResponse>, Status> {
        let (control, asked) = (self.clone(), asked.into_inner());
        // It goes on to its end when the other host has given up.
        let handing = tokio::spawn(async move { control.hand_over(asked).await });
        let handed = handing.await.map_err(|error| Status::internal(error.to_string()))?;
        let changed = handed.map_err(|error| error.to_status())?;
        Ok(Response::new(v1::HandOverCellResponse { changed }))
    }

    async fn describe_cell(
        &self,
        asked: Request<v1::DescribeCellRequest>,
    ) -> Result<Response<v1::DescribeCellResponse>, Status> {
        let described = self.describe_open_cell(&asked.into_inner());
        Ok(Response::new(described.map_err(|error| error.to_status())?))
    }
}

impl Control {
    /// Looks whether another host lives. A program that accepts a connection where its daemon
    /// should be is a sign of life, whatever it is.
    pub(super) async fn life_of(
        &self,
        group: &Arc<Group>,
        host: HostNumber,
    ) -> Result<Life, Error> {
        let asked = Arc::clone(group);
        let (ended, address) =
            blocking(move || Ok((asked.has_ended(host)?, asked.coordinator().address_of(host)?)))
                .await?;
        match (ended, address) {
            // A daemon of an older release takes no lock, and the key in the lock is a former one.
            (Some(true), Some(address)) => match probe(&address).await {
                Life::Answers(place) => Ok(Life::Answers(place)),
                Life::Silent | Life::NotKnown(_) => Ok(Life::Silent),
            },
            (Some(true), None) => Ok(Life::Silent),
            (Some(false), _) => Ok(Life::Answers("its daemon runs on this machine".to_owned())),
            (None, Some(address)) => Ok(probe(&address).await),
            (None, None) => Ok(Life::NotKnown("it has published no address".to_owned())),
        }
    }

    /// A connection to the daemon of another host of a group.
    pub(super) async fn peer(
        &self,
        group: &Arc<Group>,
        host: HostNumber,
    ) -> Result<PeersClient<Channel>, Error> {
        let asked = Arc::clone(group);
        let address = blocking(move || Ok(asked.coordinator().address_of(host)?)).await?;
        let what = || format!("host {host} of volume group {}", shown(&group.name));
        let address = address.ok_or_else(|| {
            let problem = "has published no address: give it hosts.listen in its configuration";
            Error::in_use(what(), problem)
        })?;
        let tls = self.0.options.hosts.tls.clone();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"));
        let unreachable = |problem: String| Error::in_use(what(), problem);
        let endpoint = endpoint.map_err(|_| unreachable(format!("has the address {address}")))?;
        let is_here = || address.parse().is_ok_and(|at: SocketAddr| at.ip().is_loopback());
        if tls.is_none() && !is_here() {
            let problem = format!(
                "is at {address}, and without certificates only this machine is asked: give \
                 hosts.certificate, hosts.key and hosts.ca"
            );
            return Err(unreachable(problem));
        }
        let endpoint = endpoint.connect_timeout(CONNECT_LIMIT);
        let endpoint = match tls {
            None => endpoint,
            Some(tls) => {
                let (identity, ca) = blocking(move || identity(&tls)).await?;
                let tls = ClientTlsConfig::new().identity(identity).ca_certificate(ca);
                endpoint.tls_config(tls).map_err(|error| {
                    unreachable(format!("can't be asked with hosts.certificate: {error}"))
                })?
            }
        };
        let channel = endpoint.connect().await.map_err(|error| {
            let causes = crate::services::standby::with_causes(&error);
            unreachable(format!("does not answer at {address}: {causes}"))
        })?;
        Ok(PeersClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES))
    }
}

/// Bounds a call of another host with its answer: the timeout of an endpoint ends at the headers.
pub(super) async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Status> {
    let answer = timeout(limit, call).await;
    answer.unwrap_or_else(|late| Err(Status::from_error(late.into()))).map(Response::into_inner)
}

/// Looks whether a program accepts connections at an address.
async fn probe(address: &str) -> Life {
    let places = match resolved(address, lookup_host(address), LOOKUP_LIMIT).await {
        Ok(places) => places,
        Err(life) => return life,
    };
    let mut life = Life::Silent;
    for round in 0..PROBES {
        if round > 0 {
            tokio::time::sleep(PROBE_PAUSE).await;
        }
        life = probe_once(address, &places).await;
        if matches!(life, Life::Answers(_)) {
            break;
        }
    }
    life
}

/// The places of an address. A name that is not resolved, or not in time, says nothing of the host.
async fn resolved<I: Iterator<Item = SocketAddr>>(
    address: &str,
    lookup: impl Future<Output = io::Result<I>>,
    limit: Duration,
) -> Result<Vec<SocketAddr>, Life> {
    match timeout(limit, lookup).await {
        Ok(Ok(places)) => Ok(places.collect()),
        Ok(Err(error)) => Err(not_tried(address, &error.to_string())),
        Err(_) => {
            let problem = format!("its name is not resolved within {} s", limit.as_secs());
            Err(not_tried(address, &problem))
        }
    }
}

fn not_tried(address: &str, problem: &str) -> Life {
    Life::NotKnown(format!("its address {address} can't be tried: {problem}"))
}

/// Tries all places of an address once, side by side. There are as many as fit in an answer of DNS.
async fn probe_once(address: &str, places: &[SocketAddr]) -> Life {
    let mut tries = JoinSet::new();
    for place in places.iter().copied() {
        tries.spawn(timeout(CONNECT_LIMIT, TcpStream::connect(place)));
    }
    let mut life = match places {
        [] => not_tried(address, "its name has no address"),
        _ => Life::Silent,
    };
    while let Some(tried) = tries.join_next().await {
        match tried {
            Ok(Ok(Ok(_))) => return Life::Answers(format!("its address is {address}")),
            Ok(Ok(Err(error))) if !is_silence(error.kind()) => {
                life = not_tried(address, &error.to_string());
            }
            Err(error) => life = not_tried(address, &error.to_string()),
            Ok(_) => {}
        }
    }
    life
}

/// Whether a connection fails like this where there is no daemon, or no host. Where this host has
/// no network, nothing can be said of another one.
const fn is_silence(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionRefused | ErrorKind::TimedOut | ErrorKind::HostUnreachable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_silence_where_the_daemon_should_be_is_a_sign_of_death() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        // The kernel accepts, though no program takes the connection: its host lives.
        assert!(matches!(probe(&address).await, Life::Answers(place) if place.contains(&address)));
        drop(listener);
        assert_eq!(probe(&address).await, Life::Silent);
        for strange in ["no-such-host.invalid:7", "no address"] {
            let life = probe(strange).await;
            assert!(matches!(&life, Life::NotKnown(why) if why.contains(strange)), "{life:?}");
        }
        // A server of names that does not answer is no dead host.
        let never = std::future::pending::<io::Result<std::vec::IntoIter<SocketAddr>>>();
        let life = resolved("host:7", never, Duration::from_millis(10)).await.unwrap_err();
        assert!(matches!(&life, Life::NotKnown(why) if why.contains("host:7")), "{life:?}");
        assert!(matches!(probe_once("host:7", &[]).await, Life::NotKnown(_)));
    }

    #[tokio::test]
    async fn a_host_that_stops_within_its_answer_does_not_answer() {
        let never = std::future::pending::<Result<Response<()>, Status>>();
        let late = within(Duration::from_millis(10), never).await.unwrap_err();
        let error = super::super::standby::refused(HostNumber(2), &late).to_string();
        assert!(error.starts_with("host 2 does not answer: "), "{error}");
    }
}
