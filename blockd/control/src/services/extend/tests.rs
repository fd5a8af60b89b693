use std::time::Duration;

use blockd_api::extend::Form;

use super::*;
use crate::services::testing::Rig;

/// Long enough for what is meant to happen never.
const A_WHILE: Duration = Duration::from_millis(400);

fn server(rig: &Rig) -> Arc<Server> {
    let (control, queue) = (rig.control.clone(), Arc::new(Queue::default()));
    Arc::new(Server { control, pool: "default".to_owned(), queue })
}

fn peer(user: u32) -> Peer {
    Peer { user, text: format!("unix uid {user} pid 1") }
}

/// The end of a connection of this user that sends these bytes, and the bytes that it receives.
async fn says(rig: &Rig, user: u32, bytes: &[u8]) -> (Result<(), Problem>, Vec<u8>) {
    let (mut client, stream) = UnixStream::pair().unwrap();
    client.write_all(bytes).await.unwrap();
    client.shutdown().await.unwrap();
    let ended = server(rig).serve(stream, &peer(user)).await;
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).await.unwrap();
    (ended, answer)
}

#[tokio::test]
async fn only_root_stops_the_daemon_of_any_user() {
    let rig = Rig::new().await;
    let shutdown = Message::Shutdown(Form::Binary).encode().unwrap();
    let (ended, answer) = says(&rig, 1000, &shutdown).await;
    assert!(matches!(ended, Err(Problem::NotRoot(1000))), "{ended:?}");
    assert!(answer.is_empty());
    assert!(tokio::time::timeout(A_WHILE, rig.control.stop_requested()).await.is_err());

    // Of root's, the connection stays until the process ends.
    let (mut client, stream) = UnixStream::pair().unwrap();
    client.write_all(&shutdown).await.unwrap();
    server(&rig).serve(stream, &peer(0)).await.unwrap();
    rig.control.stop_requested().await;
    assert!(tokio::time::timeout(A_WHILE, client.read_u8()).await.is_err());
}

#[tokio::test]
async fn a_name_that_is_no_text_is_no_volumes() {
    let rig = Rig::new().await;
    let (form, name) = (Form::Ascii, b"\xff\xfe".to_vec());
    let numbers = (1, 0, 0);
    let (virtual_size, current_size, metadata_size) = numbers;
    let extend = Extend { form, name, virtual_size, current_size, metadata_size };
    let (ended, answer) = says(&rig, 0, &Message::Extend(extend).encode().unwrap()).await;
    let problem = ended.unwrap_err().to_string();
    assert_eq!(problem, r"volume \xff\xfe does not exist in this pool");
    assert!(answer.is_empty());
}
