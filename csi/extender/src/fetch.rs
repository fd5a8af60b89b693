//! Capacities of nodes: from their annotations, or else from the metrics of their plugins.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::clock::Clock;
use blockd_csi_base::error::shown;
use blockd_csi_base::quantity;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Bytes as Body;
use hyper::header::HOST;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::decide::Figures;
use super::demand::{Demand, annotation};
use super::wire::Node;

/// The metric in which plugins export their capacity.
pub(super) const METRIC: &str = "blockd_csi_class_available_bytes";

/// Timeout of one node. The scheduler's default timeout for an extender is five seconds, and all
/// nodes have to fit.
const NODE_TIME: Duration = Duration::from_millis(1500);

/// Nodes that are asked at once: sockets, far below the usual limit of 1024 files.
const AT_ONCE: usize = 128;

/// How long an answer is cached: the scheduler calls twice for a pod, in quick succession.
const FRESH: Duration = Duration::from_secs(1);

/// Answers that are kept: as many nodes as Kubernetes has.
const MAX_KEPT: usize = 5000;

/// Longest answer: a plugin's metrics are some tens of KiB, and a class adds a line.
const MAX_ANSWER: usize = 1 << 20;

type Capacities = Result<BTreeMap<String, Bytes>, String>;

/// Where figures come from.
#[derive(Clone, Debug)]
pub(super) struct Source {
    driver: Arc<str>,
    port: u16,
    places: Arc<Semaphore>,
    kept: Arc<Mutex<HashMap<String, (Clock, Capacities)>>>,
}

/// A node that is asked about.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// Its name.
    pub(super) name: String,
    annotations: BTreeMap<String, String>,
    host: Option<String>,
}

impl Place {
    /// One that came with all that is known of it.
    pub(super) fn of(node: Node) -> Self {
        let addresses = node.status.addresses.unwrap_or_default();
        let internal = addresses.into_iter().find(|address| address.kind == "InternalIP");
        Self {
            name: node.metadata.name.unwrap_or_default(),
            annotations: node.metadata.annotations.unwrap_or_default(),
            host: internal.map(|address| address.address),
        }
    }

    /// One of which only the name is known: it has to be that of its host.
    pub(super) fn named(name: String) -> Self {
        Self { host: Some(name.clone()), name, annotations: BTreeMap::new() }
    }
}

impl Source {
    /// For the classes of this driver, whose plugins serve their metrics at this port.
    pub(super) fn new(driver: &str, port: u16) -> Self {
        let places = Arc::new(Semaphore::new(AT_ONCE));
        Self { driver: driver.into(), port, places, kept: Arc::default() }
    }

    /// Returns the nodes' figures for the requested classes, in the order of the nodes. A node that
    /// does not answer within `limit` has none.
    pub(super) async fn figures(
        &self,
        nodes: &[Place],
        demand: &Demand,
        limit: Duration,
    ) -> Vec<Figures> {
        let mut figures: Vec<Figures> =
            nodes.iter().map(|node| self.annotated(node, demand)).collect();
        let is_done = |known: &Figures| {
            known.problem.is_some()
                || demand.keys().all(|class| known.capacities.contains_key(class))
        };
        let mut asked = JoinSet::new();
        for (at, (node, known)) in nodes.iter().zip(&mut figures).enumerate() {
            if is_done(known) {
                continue;
            }
            let Some(host) = node.host.clone() else {
                known.problem = Some("the node has no annotation and no InternalIP".to_owned());
                continue;
            };
            known.problem = Some("no answer in time".to_owned());
            let source = self.clone();
            asked.spawn(async move { (at, source.capacities(host).await) });
        }
        let all = async {
            while let Some(ended) = asked.join_next().await {
                let Ok((at, found)) = ended else { continue };
                let Some(known) = figures.get_mut(at) else { continue };
                match found {
                    Ok(capacities) => {
                        known.problem = None;
                        for (class, bytes) in capacities {
                            known.capacities.entry(class).or_insert(bytes);
                        }
                    }
                    Err(problem) => known.problem = Some(problem),
                }
            }
        };
        // Nodes that did not answer by then keep their earlier reason.
        let _ = tokio::time::timeout(limit, all).await;
        figures
    }

    fn annotated(&self, node: &Place, demand: &Demand) -> Figures {
        let mut figures = Figures::default();
        for class in demand.keys() {
            let key = annotation(&self.driver, class);
            let Some(text) = node.annotations.get(&key) else { continue };
            match quantity::size(&format!("annotation {key}"), text) {
                Ok(bytes) => {
                    figures.capacities.insert(class.clone(), bytes);
                }
                Err(error) => figures.problem = Some(error.to_string()),
            }
        }
        figures
    }

    /// Returns the capacities that the plugin of a host exports, at most [`FRESH`] old.
    async fn capacities(&self, host: String) -> Capacities {
        if let Some((since, found)) = self.kept.lock().get(&host)
            && since.elapsed() < FRESH
        {
            return found.clone();
        }
        let asked = tokio::time::timeout(NODE_TIME, async {
            let _place = self.places.acquire().await;
            get(&host, self.port).await
        });
        let found = match asked.await {
            Ok(text) => text.and_then(|text| parse(&text, &self.driver)),
            Err(_) => Err("no answer in time".to_owned()),
        };
        let found = found.map_err(|problem| format!("{}:{}: {problem}", shown(&host), self.port));
        let mut kept = self.kept.lock();
        if kept.len() >= MAX_KEPT {
            kept.retain(|_, (since, _)| since.elapsed() < FRESH);
        }
        if kept.len() < MAX_KEPT {
            kept.insert(host, (Clock::start(), found.clone()));
        }
        found
    }
}

async fn get(host: &str, port: u16) -> Result<String, String> {
    let failed = |error: &dyn std::fmt::Display| shown(error);
    let stream = TcpStream::connect((host, port)).await.map_err(|error| failed(&error))?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| failed(&error))?;
    // Ends with the request, or when this is dropped.
    let mut running = JoinSet::new();
    running.spawn(connection);
    let request = Request::get("/metrics").header(HOST, "plugin").body(Empty::<Body>::new());
    let request = request.map_err(|error| failed(&error))?;
    let answer = sender.send_request(request).await.map_err(|error| failed(&error))?;
    if answer.status() != StatusCode::OK {
        return Err(format!("answers {}", answer.status()));
    }
    let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
    let body = body.map_err(|error| failed(&error))?.to_bytes();
    String::from_utf8(body.to_vec()).map_err(|error| failed(&error))
}

/// Returns the capacities of a driver's classes, by class, that a page of metrics has.
///
/// # Errors
/// The page has none of this driver, or can't be read; the text says why.
pub fn parse(text: &str, driver: &str) -> Result<BTreeMap<String, Bytes>, String> {
    let mut capacities = BTreeMap::new();
    let mut others = false;
    for line in text.lines() {
        let Some(rest) = line.strip_prefix(METRIC).and_then(|rest| rest.strip_prefix('{')) else {
            continue;
        };
        let refused = || format!("{METRIC} can't be read: {}", shown(line));
        let (labels, value) = labels(rest).ok_or_else(refused)?;
        if labels.get("driver").map(String::as_str) != Some(driver) {
            others = true;
            continue;
        }
        let class = labels.get("class").ok_or_else(refused)?;
        let bytes = value.trim().parse().ok().and_then(Bytes::new).ok_or_else(refused)?;
        capacities.insert(class.clone(), bytes);
    }
    match (capacities.is_empty(), others) {
        (true, true) => Err("is the plugin of another driver".to_owned()),
        (true, false) => Err(format!("exports no {METRIC}: its blockd does not answer")),
        (false, _) => Ok(capacities),
    }
}

/// The labels before a closing brace, and the text after it.
fn labels(mut rest: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(value) = rest.strip_prefix('}') {
            return Some((labels, value));
        }
        let (name, after) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = after.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at + 1,
                (_, '\\') => match chars.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.insert(name.to_owned(), value);
        rest = after.get(end..)?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::proptest;

    use super::*;

    #[test]
    fn classes_of_one_driver_are_read_out_of_metrics() {
        let line = |driver: &str, class: &str, bytes: i64| {
            format!("{METRIC}{{driver=\"{driver}\",class=\"{class}\"}} {bytes}\n")
        };
        let page = ["# TYPE x gauge\n", &line("d", "thin", 7), &line("e", "thin", 8), "# EOF\n"];
        let read = parse(&page.concat(), "d").unwrap();
        assert_eq!(read, [("thin".to_owned(), Bytes::constant(7))].into());
        assert!(parse(&page.concat(), "f").unwrap_err().contains("another driver"));
        assert!(parse("# EOF\n", "d").unwrap_err().contains("does not answer"));
    }

    #[test]
    fn labels_are_read_with_all_that_can_be_in_them() {
        let (read, value) = labels(r#"a="x",b="q\"u\\o\n}" } 7"#).unwrap();
        assert_eq!((read["a"].as_str(), read["b"].as_str()), ("x", "q\"u\\o\n}"));
        assert_eq!(value, " 7");
        for wrong in ["", "a", "a=\"", "a=\"\\", "a=\"x\"", "a=x}"] {
            assert!(labels(wrong).is_none(), "{wrong}");
        }
        let line = format!("{METRIC}{{driver=\"d\",class=\"a\"}} -1");
        assert!(parse(&line, "d").unwrap_err().contains("can't be read"));
    }

    proptest! {
        #[test]
        fn no_text_is_a_panic(text in ".*") {
            let _ = parse(&format!("{METRIC}{{{text}"), "d");
        }
    }
}
