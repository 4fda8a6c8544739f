-- What versions before 0.1.33 called: functions that take or return something else by now. `create or replace` would be refused, or make
-- another one beside them.
drop function if exists waybill.publish_one(text, text, text, text, jsonb);
drop function if exists waybill.record_lost(text[], uuid[], uuid[], text[], int[], int[], waybill.delivery_status[]),
  waybill.record_lost(text[], uuid[], uuid[], text[], int[], int[], waybill.delivery_status[], boolean);
drop function if exists waybill.unclaim(uuid[], int[]), waybill.unclaim(uuid[], int[], int);
drop function if exists waybill.claim_due(boolean, boolean, int, bigint), waybill.claim_due(boolean, boolean, int, bigint, text[]);
