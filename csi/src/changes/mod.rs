//! The snapshot metadata service: the allocated ranges of a snapshot, and the changed ranges
//! between two, as streams for backups.

mod look;
mod ranges;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::plugin::{Answers, Call, Plugin};
use crate::proto;
use crate::proto::BlockMetadataType::VariableLength;
use crate::proto::snapshot_metadata_server::SnapshotMetadata;

use self::look::Asked;

/// The service.
#[derive(Clone, Debug)]
pub struct Service {
    plugin: Arc<Plugin>,
}

impl Service {
    /// For this plugin.
    #[must_use]
    pub const fn new(plugin: Arc<Plugin>) -> Self {
        Self { plugin }
    }
}

#[tonic::async_trait]
impl SnapshotMetadata for Service {
    type GetMetadataAllocatedStream = Answers<proto::GetMetadataAllocatedResponse>;
    type GetMetadataDeltaStream = Answers<proto::GetMetadataDeltaResponse>;

    async fn get_metadata_allocated(
        &self,
        request: Request<proto::GetMetadataAllocatedRequest>,
    ) -> Result<Response<Self::GetMetadataAllocatedStream>, Status> {
        let call = Call::new("GetMetadataAllocated", &request, &request.get_ref().snapshot_id);
        let asked = request.into_inner();
        let asked = Asked {
            base: None,
            target: ("snapshot_id", asked.snapshot_id),
            from: asked.starting_offset,
            max_results: asked.max_results,
            secrets: asked.secrets,
        };
        let plugin = Arc::clone(&self.plugin);
        let message = |size, block_metadata| proto::GetMetadataAllocatedResponse {
            block_metadata_type: VariableLength.into(),
            volume_capacity_bytes: size,
            block_metadata,
        };
        self.plugin.stream(call, |sink| look::send(plugin, asked, sink, message)).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<proto::GetMetadataDeltaRequest>,
    ) -> Result<Response<Self::GetMetadataDeltaStream>, Status> {
        let call = Call::new("GetMetadataDelta", &request, &request.get_ref().target_snapshot_id);
        let asked = request.into_inner();
        let asked = Asked {
            base: Some(("base_snapshot_id", asked.base_snapshot_id)),
            target: ("target_snapshot_id", asked.target_snapshot_id),
            from: asked.starting_offset,
            max_results: asked.max_results,
            secrets: asked.secrets,
        };
        let plugin = Arc::clone(&self.plugin);
        let message = |size, block_metadata| proto::GetMetadataDeltaResponse {
            block_metadata_type: VariableLength.into(),
            volume_capacity_bytes: size,
            block_metadata,
        };
        self.plugin.stream(call, |sink| look::send(plugin, asked, sink, message)).await
    }
}
