//! The snapshot metadata service with a daemon whose streams follow a script of the test.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_api::v1::{self, RangeState, VolumeRange};
use tokio_stream::StreamExt as _;
use tonic::Code;

use super::*;
use crate::plugin::Streams;
use crate::testing::{MIB, Rig, StreamStep};

const SIZE: i64 = 8 * MIB;
const FIRST: &str = "default/csi.a@1";
const SECOND: &str = "default/csi.a@2";

/// A volume of 8 MiB with two snapshots, another with one, and foreign volumes.
fn rig() -> Rig {
    let rig = Rig::simple();
    for name in ["csi.a", "csi.b", "somebodys"] {
        rig.fake.add("default", name, SIZE);
    }
    for (name, origin) in [("csi.a@1", 1), ("csi.a@2", 1), ("csi.b@1", 2), ("somebodys@1", 3)] {
        rig.fake.add("default", name, SIZE);
        rig.fake.change("default", name, |one| {
            one.kind = v1::VolumeKind::Snapshot.into();
            one.origin_id = origin;
            one.family_id = origin;
        });
    }
    rig
}

/// A message with a range of 4 KiB in each 8 KiB, from here on, as many as there are to be.
fn part(from: i64, count: i64, size: i64) -> v1::DiffVolumeResponse {
    let range = |number: i64| VolumeRange {
        offset_bytes: from + number * 4096,
        length_bytes: 4096,
        state: if number % 2 == 0 { RangeState::Data } else { RangeState::Same }.into(),
    };
    v1::DiffVolumeResponse {
        ranges: (0..count).map(range).collect(),
        volume_bytes: size,
        next_bytes: from + count * 4096,
    }
}

/// Scripts streams over the whole volume in messages of `count` ranges.
fn script_messages_of(rig: &Rig, count: i64) {
    rig.fake.script_streams(
        |_| (),
        move |request, number| {
            let from = request.from_bytes + i64::try_from(number).unwrap() * count * 4096;
            let left = (SIZE - from) / 4096;
            if left <= 0 {
                StreamStep::End
            } else {
                StreamStep::Part(part(from, count.min(left), SIZE))
            }
        },
    );
}

fn delta(base: &str, target: &str) -> proto::GetMetadataDeltaRequest {
    proto::GetMetadataDeltaRequest {
        base_snapshot_id: base.to_owned(),
        target_snapshot_id: target.to_owned(),
        ..Default::default()
    }
}

fn whole(id: &str) -> proto::GetMetadataAllocatedRequest {
    proto::GetMetadataAllocatedRequest { snapshot_id: id.to_owned(), ..Default::default() }
}

type Messages = Result<Vec<proto::GetMetadataDeltaResponse>, Status>;

async fn call(service: &Service, request: proto::GetMetadataDeltaRequest) -> Messages {
    let answers = service.get_metadata_delta(Request::new(request)).await?;
    answers.into_inner().collect::<Result<Vec<_>, _>>().await
}

fn code(answer: &Messages) -> Code {
    answer.as_ref().err().map_or(Code::Ok, Status::code)
}

#[tokio::test]
async fn messages_respect_the_requested_length_and_have_one_style_and_size() {
    let rig = rig();
    script_messages_of(&rig, 100);
    let service = Service::new(rig.plugin());
    let ranges = usize::try_from(SIZE / 8192).unwrap();
    for (asked, most) in [(1, 1), (7, 7), (0, 1024), (1024, 1024), (1025, 1024), (i32::MAX, 1024)] {
        let request = proto::GetMetadataDeltaRequest { max_results: asked, ..delta(FIRST, SECOND) };
        let messages = call(&service, request).await.unwrap();
        assert_eq!(messages.len(), ranges.div_ceil(most), "{asked}");
        for message in &messages {
            assert!((1..=most).contains(&message.block_metadata.len()));
            assert_eq!(message.volume_capacity_bytes, SIZE);
            assert_eq!(message.block_metadata_type, i32::from(VariableLength));
        }
    }
}

#[tokio::test]
async fn an_invalid_request_fails_the_call() {
    let rig = rig();
    script_messages_of(&rig, 100);
    let service = Service::new(rig.plugin());
    let long = "x".repeat(129);
    for (base, target) in [("", SECOND), (FIRST, ""), (&long, SECOND), (FIRST, &long)] {
        assert_eq!(code(&call(&service, delta(base, target)).await), Code::InvalidArgument);
    }
    for unknown in ["default/csi.a@3", "default/csi.a", "default/somebodys@1", "x", "x/csi.a@1"] {
        assert_eq!(code(&call(&service, delta(unknown, SECOND)).await), Code::NotFound);
        assert_eq!(code(&call(&service, delta(FIRST, unknown)).await), Code::NotFound);
    }
    for (offset, expected) in [
        (-1, Code::OutOfRange),
        (i64::MIN, Code::OutOfRange),
        (SIZE + 1, Code::OutOfRange),
        (i64::MAX, Code::OutOfRange),
        (SIZE, Code::Ok),
        (SIZE - 4096, Code::Ok),
    ] {
        if offset == SIZE {
            let end =
                v1::DiffVolumeResponse { volume_bytes: SIZE, next_bytes: SIZE, ranges: vec![] };
            rig.fake.script_streams(
                |_| (),
                move |_, number| {
                    if number == 0 { StreamStep::Part(end.clone()) } else { StreamStep::End }
                },
            );
        } else {
            script_messages_of(&rig, 100);
        }
        let request = delta(FIRST, SECOND);
        let request = proto::GetMetadataDeltaRequest { starting_offset: offset, ..request };
        assert_eq!(code(&call(&service, request).await), expected, "{offset}");
    }
    for max_results in [-1, i32::MIN] {
        let request = proto::GetMetadataDeltaRequest { max_results, ..delta(FIRST, SECOND) };
        assert_eq!(code(&call(&service, request).await), Code::InvalidArgument);
    }
    let answer = call(&service, delta("default/csi.b@1", SECOND)).await;
    assert_eq!(code(&answer), Code::InvalidArgument);
    let answer = call(&service, delta(SECOND, FIRST)).await;
    assert!(answer.unwrap_err().message().contains("older than default/csi.a@1"));
    let secrets = HashMap::from([("k".to_owned(), "hush".repeat(2000))]);
    let request = proto::GetMetadataDeltaRequest { secrets, ..delta(FIRST, SECOND) };
    let status = call(&service, request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(!status.message().contains("hush"));
}

#[tokio::test]
async fn a_snapshot_of_a_former_volume_of_the_same_name_is_of_another_volume() {
    let rig = rig();
    script_messages_of(&rig, 100);
    let service = Service::new(rig.plugin());
    rig.fake.change("default", "csi.a@2", |one| one.origin_id = 77);
    assert_eq!(code(&call(&service, delta(FIRST, SECOND)).await), Code::InvalidArgument);
    assert_eq!(rig.fake.streams().opened.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_snapshot_that_was_made_anew_meanwhile_is_not_taken_for_the_old_one() {
    let rig = rig();
    let service = Service::new(rig.plugin());
    rig.fake.script_streams(
        |fake| fake.change("default", "csi.a@1", |one| one.id = 99),
        |_, _| StreamStep::Part(part(0, SIZE / 4096, SIZE)),
    );
    let answer = call(&service, delta(FIRST, SECOND)).await;
    assert_eq!(code(&answer), Code::NotFound);
}

#[tokio::test]
async fn a_stream_that_fails_in_the_middle_is_an_error_and_never_a_short_one() {
    let rig = rig();
    let service = Service::new(rig.plugin());
    let deleted = || {
        use blockd_api::Message as _;
        let kind = v1::ErrorKind::NotFound.into();
        let detail = v1::ErrorDetail { kind, message: "gone".to_owned(), ..Default::default() };
        Status::with_details(Code::NotFound, "gone", detail.encode_to_vec().into())
    };
    let ends: [(fn() -> StreamStep, Code); 4] = [
        (|| StreamStep::Failed(Status::unavailable("dies")), Code::Unavailable),
        (|| StreamStep::Failed(Status::internal("breaks")), Code::Unavailable),
        (|| StreamStep::End, Code::Internal),
        (|| StreamStep::Part(part(0, 1, SIZE)), Code::Internal),
    ];
    for (end, expected) in ends {
        rig.fake.script_streams(
            |_| (),
            move |_, number| {
                if number == 0 { StreamStep::Part(part(0, 100, SIZE)) } else { end() }
            },
        );
        for max_results in [0, 1] {
            let request = proto::GetMetadataDeltaRequest { max_results, ..delta(FIRST, SECOND) };
            assert_eq!(code(&call(&service, request).await), expected);
            let request = proto::GetMetadataAllocatedRequest { max_results, ..whole(FIRST) };
            let answers = service.get_metadata_allocated(Request::new(request)).await;
            let answers = match answers {
                Ok(answers) => answers.into_inner().collect::<Result<Vec<_>, _>>().await,
                Err(status) => Err(status),
            };
            // Of a whole snapshot, nothing is the same.
            assert!([expected, Code::Internal].contains(&answers.unwrap_err().code()));
        }
    }
    rig.fake.script_streams(
        |_| (),
        move |_, number| match number {
            0 => StreamStep::Part(part(0, 100, SIZE)),
            _ => StreamStep::Failed(deleted()),
        },
    );
    assert_eq!(code(&call(&service, delta(FIRST, SECOND)).await), Code::NotFound);
}

/// Waits until the daemon's streams are over.
async fn all_gone(rig: &Rig) {
    let streams = rig.fake.streams();
    while streams.gone.load(Ordering::SeqCst) < streams.opened.load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Scripts streams without an end, in messages of about 60 KiB.
fn script_endless_stream(rig: &Rig) {
    rig.fake.change("default", "csi.a@2", |one| one.size_bytes = 1 << 50);
    rig.fake.script_streams(
        |_| (),
        |_, number| {
            let from = i64::try_from(number).unwrap() * 4096 * 4096;
            StreamStep::Part(part(from, 4096, 1 << 50))
        },
    );
}

/// Limit of the daemon's messages in flight while the caller does not read: a window of 128 KiB,
/// the buffers of both ends of the connection, and the message in progress; in total less than 2
/// MiB, in messages of some 60 KiB.
const MOST_TAKEN: usize = 40;

#[tokio::test]
async fn a_caller_that_stops_reading_holds_bounded_memory_and_is_cancelled() {
    let rig = rig();
    script_endless_stream(&rig);
    let plugin = rig.plugin_with(Streams::new(4, Duration::from_millis(100)));
    let service = Service::new(Arc::clone(&plugin));
    let request = Request::new(delta(FIRST, SECOND));
    let mut answers = service.get_metadata_delta(request).await.unwrap().into_inner();
    all_gone(&rig).await;
    let taken = rig.fake.streams().taken.load(Ordering::SeqCst);
    assert!((1..MOST_TAKEN).contains(&taken), "{taken}");
    assert_eq!(plugin.working(), 0);
    // A caller that resumes reading receives the buffered messages, and then the error.
    let mut messages = 0;
    let status = loop {
        match answers.next().await.expect("the error comes last") {
            Ok(_) => messages += 1,
            Err(status) => break status,
        }
    };
    assert!(messages < 8, "{messages} were kept");
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status:?}");
    assert!(status.message().starts_with("nothing was read for 100 ms"), "{status:?}");
    assert!(answers.next().await.is_none());
    let text = plugin.metrics.render();
    let counted = "method=\"GetMetadataDelta\",code=\"DEADLINE_EXCEEDED\"} 1";
    assert!(text.contains(counted), "{text}");
}

#[tokio::test]
async fn a_caller_that_stops_reading_is_ended_by_its_deadline() {
    let rig = rig();
    script_endless_stream(&rig);
    let service = Service::new(rig.plugin());
    let mut request = Request::new(delta(FIRST, SECOND));
    request.set_timeout(Duration::from_millis(400));
    // A machine that stands still so long has answered nothing by then: that is no other end.
    let last = match service.get_metadata_delta(request).await {
        Err(status) => Err(status),
        Ok(answers) => {
            all_gone(&rig).await;
            let mut answers = answers.into_inner();
            let mut last = Ok(());
            while let Some(answer) = answers.next().await {
                last = answer.map(|_| ());
            }
            last
        }
    };
    assert_eq!(last.unwrap_err().code(), Code::DeadlineExceeded);
    all_gone(&rig).await;
    assert!(rig.fake.streams().taken.load(Ordering::SeqCst) < MOST_TAKEN);
}

#[tokio::test]
async fn a_disconnected_caller_frees_the_daemons_stream() {
    let rig = rig();
    script_endless_stream(&rig);
    let plugin = rig.plugin();
    let service = Service::new(Arc::clone(&plugin));
    let request = Request::new(delta(FIRST, SECOND));
    let mut answers = service.get_metadata_delta(request).await.unwrap().into_inner();
    assert!(answers.next().await.unwrap().is_ok());
    drop(answers);
    all_gone(&rig).await;
    // The same while the daemon says nothing.
    rig.fake.script_streams(
        |_| (),
        |_, number| match number {
            0 => StreamStep::Part(part(0, 4096, 1 << 50)),
            _ => StreamStep::Silence,
        },
    );
    let request = Request::new(delta(FIRST, SECOND));
    drop(service.get_metadata_delta(request).await.unwrap());
    all_gone(&rig).await;
    assert!(rig.fake.streams().taken.load(Ordering::SeqCst) < 2 * MOST_TAKEN);
    while plugin.working() > 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let text = plugin.metrics.render();
    assert!(text.contains("method=\"GetMetadataDelta\",code=\"CANCELLED\"} 2"), "{text}");
}

#[tokio::test]
async fn no_more_streams_are_worked_on_than_there_may_be_and_all_end_with_the_plugin() {
    let rig = rig();
    script_endless_stream(&rig);
    let plugin = rig.plugin_with(Streams::new(3, Duration::from_secs(600)));
    let service = Service::new(Arc::clone(&plugin));
    let mut open = Vec::new();
    for _ in 0..3 {
        let request = Request::new(delta(FIRST, SECOND));
        open.push(service.get_metadata_delta(request).await.unwrap().into_inner());
    }
    let answer = call(&service, delta(FIRST, SECOND)).await;
    assert_eq!(code(&answer), Code::ResourceExhausted);
    // Other calls continue while streams are not read.
    let version = plugin.daemon.version(v1::VersionRequest {}).await;
    assert!(version.unwrap().ready);
    plugin.end_streams();
    for answers in open {
        let mut answers = answers;
        let mut last = Ok(());
        while let Some(answer) = answers.next().await {
            last = answer.map(|_| ());
        }
        assert_eq!(last.unwrap_err().code(), Code::Unavailable);
    }
    all_gone(&rig).await;
    assert_eq!(plugin.working(), 0);
}

#[tokio::test]
async fn offsets_of_an_encrypted_volume_are_those_behind_its_header() {
    let header = 16 * MIB;
    let whole = SIZE + header;
    let rig = rig();
    for name in ["csi.a@1", "csi.a@2"] {
        rig.fake.change("default", name, |one| {
            one.size_bytes = whole;
            one.labels.insert("csi.blockd.io/encryption".to_owned(), "luks2".to_owned());
        });
    }
    rig.fake.script_streams(
        |_| (),
        move |request, number| match number {
            0 => {
                let from = request.from_bytes;
                assert_eq!(from, header + 8192);
                StreamStep::Part(part(from, (whole - from) / 4096, whole))
            }
            _ => StreamStep::End,
        },
    );
    let request = proto::GetMetadataDeltaRequest { starting_offset: 8192, ..delta(FIRST, SECOND) };
    let messages = call(&Service::new(rig.plugin()), request).await.unwrap();
    let first = &messages[0];
    assert_eq!(first.volume_capacity_bytes, SIZE);
    assert_eq!(first.block_metadata[0].byte_offset, 8192);
    assert!(first.block_metadata.iter().all(|one| one.byte_offset + one.size_bytes <= SIZE));
}
