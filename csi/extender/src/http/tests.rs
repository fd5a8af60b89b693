//! The server on a port of this machine, with plugins' metrics on others.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener as Listener, TcpStream};
use std::thread;

use blockd_csi_base::bytes::Bytes;
use blockd_csi_base::options::DEFAULT_DRIVER;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::Plugin;
use crate::cluster::Cluster;
use crate::fetch::METRIC;
use crate::score::{Divisor, Mode};

/// An extender that scrapes plugins at this port.
fn extender(metrics_port: u16) -> Extender {
    let plugin = Plugin {
        class_parameter: "csi.blockd.io/device-class".to_owned(),
        default_class: "default".to_owned(),
        default_size: Bytes::constant(1_073_741_824),
    };
    // No pod of these tests has a claim, but for one: nothing listens there.
    let cluster = Cluster::new(("127.0.0.1".to_owned(), 1), std::path::Path::new("/nowhere"));
    Extender {
        claims: Claims::new(DEFAULT_DRIVER, &plugin.class_parameter, cluster),
        reader: Reader::new(DEFAULT_DRIVER, &plugin),
        source: Source::new(DEFAULT_DRIVER, metrics_port),
        metrics: Metrics::new(),
        rule: Rule { mode: Mode::Bytes, default: Divisor::ONE, divisors: [].into() },
    }
}

/// Starts it.
async fn start(metrics_port: u16) -> SocketAddr {
    let listener = bind((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(extender(metrics_port), listener, None));
    address
}

/// Sends a request as a foreign client writes it; returns the answer's status and body.
async fn call(address: SocketAddr, method: &str, path: &str, body: String) -> (u16, String) {
    let (method, path) = (method.to_owned(), path.to_owned());
    let exchange = move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: extender\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        // A request that is refused may not be read to its end.
        let _ = stream.write_all(body.as_bytes());
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    };
    tokio::task::spawn_blocking(exchange).await.unwrap()
}

async fn post(address: SocketAddr, path: &str, body: &Value) -> Value {
    let (status, text) = call(address, "POST", path, body.to_string()).await;
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// A pod with an inline volume of that size.
fn pod(bytes: i64) -> Value {
    let volume = json!({
        "name": "v",
        "csi": { "driver": DEFAULT_DRIVER, "volumeAttributes": { "size": bytes.to_string() } },
    });
    json!({ "metadata": { "name": "p" }, "spec": { "volumes": [volume] } })
}

fn annotated(name: &str, bytes: &str) -> Value {
    json!({
        "metadata": {
            "name": name,
            "annotations": { "capacity.csi.blockd.io/default": bytes },
            "labels": { "kept": "yes" },
        },
        "spec": { "podCIDR": "10.0.0.0/24" },
    })
}

/// The metrics server of a plugin, which answers like this. Returns its port.
fn plugin(address: [u8; 4], port: u16, answer: String) -> u16 {
    let listener = Listener::bind((IpAddr::from(address), port)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(format!("HTTP/1.1 {answer}").as_bytes());
        }
    });
    port
}

fn at(name: &str, address: &str) -> Value {
    let addresses = json!([
        { "type": "Hostname", "address": "elsewhere" },
        { "type": "InternalIP", "address": address },
    ]);
    json!({ "metadata": { "name": name }, "status": { "addresses": addresses } })
}

/// Row: T25.
#[tokio::test(flavor = "multi_thread")]
async fn capacity_is_read_from_annotations_and_nodes_are_returned_unchanged() {
    let address = start(1).await;
    let nodes = [
        annotated("exact", "524288000"),
        annotated("small", "524287999"),
        annotated("large", "1Gi"),
        annotated("odd", "much"),
    ];
    let arguments = json!({
        "Pod": pod(524_288_000),
        "Nodes": { "metadata": { "resourceVersion": "7" }, "items": nodes },
        "NodeNames": null,
    });
    let result = post(address, "/predicate", &arguments).await;
    assert_eq!(
        result["Nodes"],
        json!({ "metadata": { "resourceVersion": "7" }, "items": [nodes[0], nodes[2]] })
    );
    assert_eq!((&result["NodeNames"], &result["Error"]), (&Value::Null, &json!("")));
    let failed = result["FailedNodes"].as_object().unwrap();
    assert_eq!(failed.len(), 2);
    assert_eq!(failed["small"], "class default: 524288000 bytes requested, 524287999 bytes free");
    let odd = failed["odd"].as_str().unwrap();
    assert!(odd.contains("annotation capacity.csi.blockd.io/default is much"), "{odd}");
    let scores = post(address, "/prioritize", &arguments).await;
    let expected = [("exact", 1), ("small", 0), ("large", 10), ("odd", 0)];
    let expected = expected.map(|(host, score)| json!({ "Host": host, "Score": score }));
    assert_eq!(scores, json!(expected));
}

/// Row: P35.
#[tokio::test(flavor = "multi_thread")]
async fn metrics_of_all_nodes_are_scraped_concurrently() {
    // A plugin that exports the metric, one that never answers, and a port without a listener.
    let metrics =
        format!("{METRIC}{{driver=\"{DEFAULT_DRIVER}\",class=\"default\"}} 1000000\n# EOF\n");
    let page = format!("200 OK\r\nContent-Length: {}\r\n\r\n{metrics}", metrics.len());
    let port = plugin([127, 0, 0, 2], 0, page);
    let silent = Listener::bind((IpAddr::from([127, 0, 0, 3]), port)).unwrap();
    plugin([127, 0, 0, 4], port, "500 Sorry\r\nContent-Length: 0\r\n\r\n".to_owned());
    let address = start(port).await;
    let mut nodes = vec![
        at("exports", "127.0.0.2"),
        at("garbled", "127.0.0.4"),
        at("away", "127.0.0.5"),
        json!({ "metadata": { "name": "nowhere" } }),
        json!("no node at all"),
    ];
    // One after the other they would take longer than the scheduler waits.
    nodes.extend((0..40).map(|number| at(&format!("silent-{number}"), "127.0.0.3")));
    let arguments = json!({ "Pod": pod(1_000_000), "Nodes": { "items": nodes } });
    let result = post(address, "/predicate", &arguments).await;
    drop(silent);
    assert_eq!(result["Nodes"]["items"], json!([nodes[0]]));
    let failed = |name: &str| result["FailedNodes"][name].as_str().unwrap_or_default().to_owned();
    for (name, said) in [
        ("silent-0", "no answer in time"),
        ("silent-39", "no answer in time"),
        ("garbled", "answers 500"),
        ("away", "127.0.0.5"),
        ("nowhere", "no InternalIP"),
        ("", "no InternalIP"),
    ] {
        let why = failed(name);
        assert!(why.starts_with("no capacity known of class default"), "{name}: {why}");
        assert!(why.contains(said), "{name}: {why}");
    }
    // By name only, as with a scheduler that says that its extender keeps nodes.
    let arguments = json!({ "Pod": pod(1_000_001), "Nodes": null, "NodeNames": ["127.0.0.2"] });
    let result = post(address, "/predicate", &arguments).await;
    assert_eq!((&result["Nodes"], &result["NodeNames"]), (&Value::Null, &json!([])));
    let arguments = json!({ "Pod": pod(1_000_000), "NodeNames": ["127.0.0.2"] });
    let result = post(address, "/predicate", &arguments).await;
    assert_eq!(result["NodeNames"], json!(["127.0.0.2"]));
    let scores = post(address, "/prioritize", &arguments).await;
    assert_eq!(scores, json!([{ "Host": "127.0.0.2", "Score": 1 }]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_without_blockd_volumes_fits_every_node_without_a_scrape() {
    let address = start(1).await;
    let nodes = [at("a", "192.0.2.1"), json!({ "metadata": { "name": "b" } })];
    let arguments = json!({ "Pod": { "spec": {} }, "Nodes": { "items": nodes } });
    let result = post(address, "/predicate", &arguments).await;
    assert_eq!(result["Nodes"]["items"], json!(nodes));
    assert_eq!(result["FailedNodes"], json!({}));
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_refused_and_the_next_one_is_answered() {
    let address = start(1).await;
    let none = String::new;
    assert_eq!(call(address, "GET", "/status", none()).await, (200, "ok\n".to_owned()));
    assert_eq!(call(address, "POST", "/status", none()).await.0, 405);
    assert_eq!(call(address, "GET", "/predicate", none()).await.0, 405);
    assert_eq!(call(address, "POST", "/metrics", none()).await.0, 405);
    assert_eq!(call(address, "GET", "/mutate", none()).await.0, 404);
    for body in ["", "[]", "{", "{}", "{\"Nodes\": 7}", "\u{0}"] {
        assert_eq!(call(address, "POST", "/predicate", body.to_owned()).await.0, 400, "{body}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(call(address, "POST", "/prioritize", deep).await.0, 400);
    let large = " ".repeat(MAX_REQUEST + 1);
    assert_eq!(call(address, "POST", "/prioritize", large).await.0, 413);
    let volume =
        json!({ "csi": { "driver": DEFAULT_DRIVER, "volumeAttributes": { "size": "big" } } });
    let arguments = json!({ "Pod": { "spec": { "volumes": [volume] } }, "NodeNames": ["a"] });
    let result = post(address, "/predicate", &arguments).await;
    let error = result["Error"].as_str().unwrap();
    assert!(error.contains("is big: must be a number of bytes"), "{error}");
    let (status, _) = call(address, "POST", "/prioritize", arguments.to_string()).await;
    assert_eq!(status, 400);
    assert_eq!(call(address, "GET", "/status", none()).await.0, 200);
}

/// Row: P38.
#[tokio::test(flavor = "multi_thread")]
async fn over_tls_any_client_may_come_and_plain_http_gets_nothing() {
    let certified = rcgen::generate_simple_self_signed(["extender".to_owned()]).unwrap();
    let folder = std::env::temp_dir().join(format!("blockd-csi-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (certificate, key) = (folder.join("tls.crt"), folder.join("tls.key"));
    std::fs::write(&certificate, certified.cert.pem()).unwrap();
    std::fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    let acceptor = tls::acceptor(&certificate, &key).unwrap();
    for (chain, secret) in [(&key, &key), (&certificate, &certificate), (&folder, &key)] {
        let Err(error) = tls::acceptor(chain, secret) else { panic!("{chain:?} {secret:?}") };
        assert!(error.to_string().contains("blockd-csi-tls-"), "{error}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let listener = bind((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(extender(1), listener, Some(acceptor)));
    let authority = certified.cert.der().clone();
    let answer = status_over_tls(address, authority, "extender").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("ok\n"), "{answer}");
    let request = b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let mut plain = tokio::net::TcpStream::connect(address).await.unwrap();
    plain.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP/"), "{answer:?}");
}

/// The answer to `GET /status`, of a server that proves to be of that name.
async fn status_over_tls(
    address: SocketAddr,
    authority: rustls::pki_types::CertificateDer<'static>,
    name: &'static str,
) -> std::io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let mut stream = connector.connect(name.try_into().unwrap(), stream).await?;
    stream.write_all(b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// The example's certificate is for the name by which the example of a scheduler calls the service.
///
/// Row: P38.
#[tokio::test(flavor = "multi_thread")]
async fn the_certificate_of_the_example_is_for_the_name_that_the_scheduler_calls() {
    use rustls::pki_types::pem::PemObject as _;

    let examples =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/examples/extender");
    let folder = std::env::temp_dir().join(format!("blockd-csi-example-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut script = std::process::Command::new(examples.join("certificate.sh"));
    let output = script.current_dir(&folder).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let acceptor = tls::acceptor(&folder.join("tls.crt"), &folder.join("tls.key")).unwrap();
    let authority =
        rustls::pki_types::CertificateDer::from_pem_file(folder.join("ca.crt")).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let scheduler = std::fs::read_to_string(examples.join("scheduler.yaml")).unwrap();
    let name = "blockd-csi-extender.blockd.svc";
    assert!(scheduler.contains(&format!("serverName: {name}\n")), "{scheduler}");
    // The extender is called for every pod, so that none may depend on its answer.
    for line in ["filterVerb: predicate\n", "prioritizeVerb: prioritize\n", "ignorable: true\n"] {
        assert!(scheduler.contains(line), "{scheduler}");
    }
    let listener = bind((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(extender(1), listener, Some(acceptor)));
    let answer = status_over_tls(address, authority.clone(), name).await.unwrap();
    assert!(answer.ends_with("ok\n"), "{answer}");
    assert!(status_over_tls(address, authority, "other.blockd.svc").await.is_err());
}
