//! An imitation of a Kubernetes API server: HTTPS on a port of this machine, a token, and objects
//! by their paths.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use blockd_testkit::folder::Folder;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

/// How requests are answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mood {
    /// By the objects.
    Answers,
    /// Never.
    IsSilent,
    /// With an error of the server.
    Fails,
    /// With no JSON.
    Garbles,
    /// With more than any object can have.
    Floods,
}

#[derive(Debug)]
struct State {
    mood: Mood,
    token: String,
    objects: BTreeMap<String, Value>,
    requests: Vec<String>,
    connections: usize,
}

/// Its objects may be changed at any time.
#[derive(Debug)]
pub(crate) struct Cluster {
    folder: Folder,
    port: u16,
    state: Arc<Mutex<State>>,
}

impl Cluster {
    /// Starts one, with the files of a service account that any user of this machine may read.
    pub(crate) fn start() -> Self {
        let certified = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(certified.signing_key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certified.cert.der().clone()], key)
            .unwrap();
        let folder = Folder::new("cluster").unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = State {
            mood: Mood::Answers,
            token: String::new(),
            objects: BTreeMap::new(),
            requests: Vec::new(),
            connections: 0,
        };
        let cluster = Self { folder, port, state: Arc::new(Mutex::new(state)) };
        cluster.write("ca.crt", &certified.cert.pem());
        cluster.set_token("first-token");
        let (config, state) = (Arc::new(config), Arc::clone(&cluster.state));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (config, state) = (Arc::clone(&config), Arc::clone(&state));
                state.lock().unwrap().connections += 1;
                std::thread::spawn(move || converse(stream, config, &state));
            }
        });
        cluster
    }

    /// Writes a file of the service account.
    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    }

    /// Replaces the token, as the kubelet does before it expires.
    pub(crate) fn set_token(&self, token: &str) {
        self.write("token", &format!("{token}\n"));
        token.clone_into(&mut self.state.lock().unwrap().token);
    }

    /// The folder of the service account.
    pub(crate) fn account(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }

    /// The port of the server.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Changes how requests are answered.
    pub(crate) fn set_mood(&self, mood: Mood) {
        self.state.lock().unwrap().mood = mood;
    }

    /// Connections that were made so far.
    pub(crate) fn connections(&self) -> usize {
        self.state.lock().unwrap().connections
    }

    /// Paths that were requested so far.
    pub(crate) fn requests(&self) -> Vec<String> {
        self.state.lock().unwrap().requests.clone()
    }

    fn put(&self, path: String, object: Value) {
        self.state.lock().unwrap().objects.insert(path, object);
    }

    /// Adds a storage class.
    pub(crate) fn class(&self, name: &str, provisioner: &str, binding: &str, parameters: Value) {
        let object = json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": { "name": name },
            "provisioner": provisioner,
            "parameters": parameters,
            "volumeBindingMode": binding,
        });
        self.put(format!("/apis/storage.k8s.io/v1/storageclasses/{name}"), object);
    }

    /// Adds or replaces a claim in the namespace `apps`.
    pub(crate) fn claim(&self, name: &str, spec: &Value, phase: &str) {
        let object = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": { "name": name, "namespace": "apps" },
            "spec": spec,
            "status": { "phase": phase },
        });
        self.put(format!("/api/v1/namespaces/apps/persistentvolumeclaims/{name}"), object);
    }
}

fn converse(stream: TcpStream, config: Arc<ServerConfig>, state: &Mutex<State>) {
    let connection = ServerConnection::new(config).unwrap();
    let mut stream = BufReader::new(StreamOwned::new(connection, stream));
    while let Some(head) = head(&mut stream) {
        let line = head.first().cloned().unwrap_or_default();
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let (mood, status, body) = {
            let mut state = state.lock().unwrap();
            state.requests.push(path.clone());
            let expected = format!("authorization: Bearer {}", state.token);
            let failure = |message: &str| json!({ "kind": "Status", "message": message });
            let (status, body) = if !head.contains(&expected) {
                (401, failure("Unauthorized"))
            } else if state.mood == Mood::Fails {
                (403, failure(&format!("{path} is forbidden: cannot get resource")))
            } else {
                match state.objects.get(&path) {
                    Some(object) => (200, object.clone()),
                    None => (404, failure("not found")),
                }
            };
            (state.mood, status, body)
        };
        let body = match mood {
            Mood::Answers | Mood::Fails => body.to_string(),
            Mood::IsSilent => {
                // Until the client gives up.
                let _ = stream.read(&mut [0]);
                return;
            }
            Mood::Garbles => "no object".to_owned(),
            Mood::Floods => " ".repeat(16 << 20),
        };
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status} Status\r\nContent-Type: application/json\r\nContent-Length: \
             {length}\r\n\r\n"
        );
        let answered = stream.get_mut().write_all(head.as_bytes());
        if answered.and_then(|()| stream.get_mut().write_all(body.as_bytes())).is_err() {
            return;
        }
        let _ = stream.get_mut().flush();
    }
}

/// The lines of a request's head, or `None` at the end of the connection.
fn head(stream: &mut impl BufRead) -> Option<Vec<String>> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
        match line.trim_end() {
            "" => return Some(lines),
            text => lines.push(text.to_owned()),
        }
    }
}
